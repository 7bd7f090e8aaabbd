"""What a document is, and how documents without a split get one."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


class Document(NamedTuple):
    """One whole text.

    Attributes:
        name: unique within its source.
        kind: what sort of text, for example "prose" or "proofs".
        split: "train", "validation" or "test"; a document is in exactly one.
        text: never empty.
    """

    name: str
    kind: str
    split: Split
    text: str


def assign_splits(documents: Sequence[Document]) -> list[Document]:
    """Returns the documents, in the same order, with splits given by one rule.

    Within each kind, distinct texts are ranked by length (longest first, ties by
    name) and dealt out in turns of ten: the first to train, the second to
    validation, the third to test, the other seven to train. So about 80/10/10; a
    kind with three or more texts is in every split, with one of its three longest
    in each; a kind with one text is in train only, with two in train and validation.
    Equal texts share a split. Nothing is random: adding a document can move others.
    The splits that come in are ignored.
    """
    ranks = _ranks(documents)
    return [
        Document(d.name, d.kind, _split_of_rank(ranks[d.text]), d.text)
        for d in documents
    ]


def _ranks(documents: Iterable[Document]) -> dict[str, int]:
    ordered = sorted(documents, key=lambda d: (-len(d.text), d.name))
    ranks: dict[str, int] = {}
    counts: dict[str, int] = {}
    for document in ordered:
        if document.text not in ranks:
            rank = counts.get(document.kind, 0)
            ranks[document.text] = rank
            counts[document.kind] = rank + 1
    return ranks


def _split_of_rank(rank: int) -> Split:
    return {1: "validation", 2: "test"}.get(rank % 10, "train")  # pyright: ignore
