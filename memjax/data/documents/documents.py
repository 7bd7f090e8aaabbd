"""Documents, their sources, and the assignment of splits.

Texts may be larger than memory, so a source is read once for its entries (name, length
and digest of each text), which determine the splits, and once more for the texts.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from memjax.checks import require_all

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
#: Names of splits on the Hugging Face hub, in lower case.
SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
_LOG = logging.getLogger(__name__)


class Document(NamedTuple):
    """One whole text.

    Attributes:
        name: unique within its source.
        kind: sort of text, such as "prose" or "proofs".
        split: "train", "validation" or "test"; a document is in exactly one.
        text: never empty.
    """

    name: str
    kind: str
    split: Split
    text: str


class Entry(NamedTuple):
    """A document without its text.

    Attributes:
        name: as in `Document`.
        kind: as in `Document`.
        split: as in `Document`.
        length: characters of the text.
        digest: SHA-256 of the text in UTF-8.
    """

    name: str
    kind: str
    split: Split
    length: int
    digest: bytes


class Source(NamedTuple):
    """Documents that can be read repeatedly, in the same order.

    Attributes:
        read: (split) -> the documents of that split, or all of them if the source has
            no splits of its own (their splits are then to be ignored) or split is None.
            Texts may be empty: `scan` and `read_documents` leave those out.
        has_splits: whether the documents of `read` have splits of the source.
        version: hexadecimal, differs when the documents do; None if unknown before
            they are read.
        notes: files of each split and files left out, as lines of the header.
    """

    read: Callable[[Split | None], Iterator[Document]]
    has_splits: bool
    version: str | None
    notes: tuple[str, ...] = ()


def scan(source: Source, split: Split | None) -> list[Entry]:
    """The entries of `source.read(split)`, with their splits.

    Empty texts are left out, and counted in a warning.
    """
    entries = [
        Entry(d.name, d.kind, d.split, len(d.text), text_digest(d.text))
        for d in source.read(split)
    ]
    full = [entry for entry in entries if entry.length]
    if empty := len(entries) - len(full):
        first = next(entry.name for entry in entries if not entry.length)
        _LOG.warning("%d empty texts left out, the first is %s", empty, first)
    return full if source.has_splits else _with_splits(full)


def read_documents(
    source: Source, entries: Sequence[Entry], split: Split | None
) -> Iterator[Document]:
    """The documents of one split (None: all), one at a time, after `scan(.., split)`.

    Raises:
        ValueError: if the source has changed since it was scanned.
    """
    full = (document for document in source.read(split) if document.text)
    for entry, document in itertools.zip_longest(entries, full):
        # Splits and cached tokens are those of the scanned texts.
        if (
            entry is None
            or document is None
            or (entry.name, entry.digest) != (document.name, text_digest(document.text))
        ):
            name = next(item.name for item in (entry, document) if item is not None)
            raise ValueError(f"document {name!r} changed while the source was read")
        if split in (None, entry.split):
            yield Document(entry.name, entry.kind, entry.split, document.text)


def text_digest(text: str) -> bytes:
    """SHA-256 of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def assign_splits(documents: Sequence[Document]) -> list[Document]:
    """Assigns splits deterministically; returns the documents in the same order.

    Within each kind, distinct texts are ranked by length (longest first, ties by name)
    and dealt out in turns of ten: the first to train, the second to validation, the
    third to test, the other seven to train: about 80/10/10. A kind of three or more
    texts is in every split, with one of its three longest in each; of one text in
    train only; of two in train and validation. Equal texts share a split. Adding a
    document can move others. Given splits are ignored.

    Raises:
        ValueError: on anything but documents, by name.
    """
    require_all("documents", documents, Document)
    entries = _with_splits(
        [
            Entry(d.name, d.kind, d.split, len(d.text), text_digest(d.text))
            for d in documents
        ]
    )
    return [
        Document(d.name, d.kind, entry.split, d.text)
        for d, entry in zip(documents, entries, strict=True)
    ]


def _with_splits(entries: Sequence[Entry]) -> list[Entry]:
    ranks = _ranks(entries)
    return [
        Entry(e.name, e.kind, _split_of_rank(ranks[e.digest]), e.length, e.digest)
        for e in entries
    ]


def _ranks(entries: Iterable[Entry]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    counts: dict[str, int] = {}
    for entry in sorted(entries, key=lambda e: (-e.length, e.name)):
        if entry.digest not in ranks:
            rank = counts.get(entry.kind, 0)
            ranks[entry.digest] = rank
            counts[entry.kind] = rank + 1
    return ranks


def _split_of_rank(rank: int) -> Split:
    return {1: "validation", 2: "test"}.get(rank % 10, "train")  # pyright: ignore
