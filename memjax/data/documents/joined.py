"""Rows of a source joined to longer documents."""

import itertools
import re
from collections.abc import Iterator

from memjax.data.documents.documents import Document, Source, Split
from memjax.data.documents.readers import check_size

#: Headings of an article and, with more signs, of its sections, as in WikiText-103.
_TITLE = re.compile(r" ?= (?!= ).+ = ?\n?")
_FORMS = "a number of rows, 'blank' (up to an empty row) or 'articles' (= Title =)"


def check_join(join: str | None) -> None:
    """Raises ValueError if `join` is none of its forms."""
    if join is not None and not (join in ("blank", "articles") or _number(join)):
        raise ValueError(f"join={join!r} must be {_FORMS}")


def join_rows(source: Source, join: str) -> Source:
    """The source with consecutive rows of one split and kind joined, line by line.

    Args:
        source: its documents are the rows; empty ones are empty lines.
        join: "N", that many rows; "blank", rows up to an empty one; "articles", rows
            from a title on, `= Title =` behind an empty row, as in WikiText-103.

    Raises:
        ValueError: another `join`; from `read`: a row before the first title, or a
            document that is too long.
    """
    check_join(join)

    def read(split: Split | None) -> Iterator[Document]:
        rows = source.read(split)
        for _, run in itertools.groupby(rows, lambda row: (row.split, row.kind)):
            yield from _joined(run, join)

    version = source.version and f"{source.version} {join}"
    return source._replace(read=read, version=version)


def _joined(rows: Iterator[Document], join: str) -> Iterator[Document]:
    open_: list[Document] = []
    size, was_empty = 0, True
    for row in rows:
        empty = not row.text.strip()
        starts = {
            "blank": was_empty and not empty,
            "articles": was_empty and _TITLE.fullmatch(row.text) is not None,
        }.get(join, len(open_) == _number(join))
        if starts and open_:
            yield _document(open_)
            open_, size = [], 0
        if join == "articles" and not (starts or open_ or empty):
            raise ValueError(
                f"{row.name}: the row is behind no title of an article, = Title =: "
                f"join must be of another form: {_FORMS}"
            )
        was_empty = empty
        # Empty rows at the start are of no document.
        if open_ or not empty:
            open_.append(row)
            size += len(row.text.encode("utf-8")) + 1
            check_size(size, open_[0].name)
    if open_:
        yield _document(open_)


def _document(rows: list[Document]) -> Document:
    lines = (row.text.removesuffix("\n") for row in rows)
    return rows[0]._replace(text="\n".join(lines).rstrip("\n") + "\n")


def _number(join: str) -> int:
    return int(join) if re.fullmatch(r"[1-9]\d{0,8}", join) else 0
