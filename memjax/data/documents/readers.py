"""Readers of text, Markdown, JSON and parquet files, plain or compressed.

Each yields the place of a text within its file, such as ":3" for the third row, and
the text; None for a null, which `documents.scan` leaves out.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from memjax.buckets.bucket import as_path, is_bucket
from memjax.checks import listed
from memjax.config_io import parse_json

#: Bytes of one document. Tokenizers need tens of times the memory of a text.
MAX_DOCUMENT = 2**27
#: Bytes of text in one row group of parquet, which is decoded whole.
MAX_ROW_GROUP = 2**30
#: Columns with the text, the first that is present.
TEXT_COLUMNS = ("text", "book_text", "content", "document", "article")
KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")

#: A place in a file, and the text there.
Row = tuple[str, Any]


def kind_of(name: str) -> str:
    """The kind of file, such as ".jsonl" of "a.jsonl.zst"; "" if it is not read."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix not in COMPRESSIONS:
        return suffix if suffix in KINDS else ""
    inner = os.path.splitext(stem)[1]
    # Parquet is compressed inside.
    return inner if inner in KINDS and inner != ".parquet" else ""


def read_rows(file: str, column: str | None, by_line: bool) -> Iterator[Row]:
    """The texts of a file.

    Args:
        file: path or URL, of a kind that `kind_of` knows.
        column: key or column of the text; None takes the first of `TEXT_COLUMNS`.
        by_line: each line of a text file is a row, and else the file is one text.

    Raises:
        ValueError: naming file and line, if the file is malformed, has no such column
            or a text that is no string or of more than `MAX_DOCUMENT` bytes.
        ImportError: pyarrow is needed, and missing.
    """
    readers: dict[str, Callable[..., Iterator[Row]]] = {
        ".txt": _read_lines if by_line else _read_text,
        ".md": _read_lines if by_line else _read_text,
        ".jsonl": _read_json,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    for place, text in readers[kind_of(file)](file, column):
        check_text(text, f"{file}{place}")
        yield place, text


def check_text(text: Any, where: str) -> None:
    """Raises ValueError for what is neither a text of a document nor None."""
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"{where}: text is {type(text).__name__}, not a string")
    try:
        check_size(len(text.encode("utf-8")), where)
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not valid Unicode ({error.reason})") from error


def check_size(size: int, where: str) -> None:
    """Raises ValueError on more bytes than a document may have."""
    if size > MAX_DOCUMENT:
        raise ValueError(
            f"{where}: more than {MAX_DOCUMENT:,} bytes, which one document may have; "
            "split it"
        )


def text_column(names: list[str], column: str | None, where: str) -> str:
    """The column with the text.

    Raises:
        ValueError: none of `names` is `column`, or one of `TEXT_COLUMNS` if it is None.
    """
    for name in TEXT_COLUMNS if column is None else (column,):
        if name in names:
            return name
    wanted = repr(column) if column else " or ".join(map(repr, TEXT_COLUMNS))
    raise ValueError(f"{where}: no column {wanted}; it has {listed(names)}")


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """The content, decompressed, behind a byte-order mark."""
    # A Path takes longer to make than a short file to read.
    raw: Any = as_path(file).open("rb") if is_bucket(file) else open(file, "rb")
    with raw:
        content = raw
        if file.lower().endswith(".gz"):
            content = gzip.GzipFile(fileobj=raw)
        elif file.lower().endswith(".zst"):
            content = _pyarrow(file).CompressedInputStream(raw, "zstd")
        # Its `readline` takes a limit, and it peeks.
        with io.BufferedReader(content) as stream:
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            yield stream


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Lines and their numbers; lines of str would also end at characters of JSON."""
    try:
        with _opened(file) as stream:
            lines = iter(lambda: stream.readline(MAX_DOCUMENT + 1), b"")
            for number, line in enumerate(lines, start=1):
                check_size(len(line), f"{file}:{number}")
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _decoded(content: bytes, file: str, first_line: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise ValueError(f"{file}:{line}: not UTF-8 ({error.reason})") from error


def _whole(file: str) -> bytes:
    """The content of a file that is one document."""
    parts, size = [], 0
    for _, line in _lines(file):
        size += len(line)
        check_size(size, file)
        parts.append(line)
    return b"".join(parts)


def _read_text(file: str, column: str | None) -> Iterator[Row]:
    yield "", _decoded(_whole(file), file, 1)


def _read_lines(file: str, column: str | None) -> Iterator[Row]:
    for number, line in _lines(file):
        yield f":{number}", _decoded(line, file, number)


def _read_json(file: str, column: str | None) -> Iterator[Row]:
    """Objects, one a line or all in one array."""
    lines = ((n, line) for n, line in _lines(file) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if kind_of(file) == ".json" and first[1].lstrip().startswith(b"["):
        found = parse_json(_whole(file), f"{file}:")
        records = enumerate(found, start=1)
    else:
        records = (
            (n, parse_json(line, f"{file}:{n}:"))
            for n, line in itertools.chain([first], lines)
        )
    for number, record in records:
        where = f"{file}:{number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where}: needs an object, got {type(record).__name__}")
        yield f":{number}", record[text_column(list(record), column, where)]


def _pyarrow(file: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow: pip install pyarrow") from error
    return pyarrow


def _read_parquet(file: str, column: str | None) -> Iterator[Row]:
    arrow = _pyarrow(file)
    try:
        # A bucket is read in the ranges that are needed.
        place: Any = as_path(file).open("rb") if is_bucket(file) else file
        table = arrow.parquet.ParquetFile(place)
        names = cast("list[str]", table.schema_arrow.names)
        name = text_column(names, column, file)
        _check_row_groups(file, table.metadata, names.index(name))
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[name]):
            # One by one: a dictionary may repeat a long text in every row.
            for text in batch.column(0):
                row += 1
                yield f":{row}", text.as_py()
    except (arrow.ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"{file}: not a readable parquet file ({error})") from error


def _check_row_groups(file: str, metadata: Any, column: int) -> None:
    """Raises ValueError on a row group that is too large to be decoded as a whole."""
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        size = columns.column(column).total_uncompressed_size
        if size > MAX_ROW_GROUP:
            raise ValueError(
                f"{file}: row group {group} decodes to {size:,} bytes of text, of at "
                f"most {MAX_ROW_GROUP:,}; write it with smaller row groups"
            )
