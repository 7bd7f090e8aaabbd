"""Long inputs that switch context: interleaved and dilated documents.

He et al. (2025), Hierarchical Memory Transformer, https://arxiv.org/abs/2405.06067,
appendix on context switching (Figures 14 and 15). A retrieval should return to the
document of the current tokens.

Shapes: T tokens of the new text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8, Int32

from memjax.checks import check_sizes, require_all
from memjax.data.documents.tokens import TokenisedDocument

FILLER = -1


class LongInput(NamedTuple):
    """A text composed of others.

    Attributes:
        document: the new text; its kind joins those of its parts by "+".
        origin: [T] index of the part of each token, 0 or 1, or -1 for filler.
    """

    document: TokenisedDocument
    origin: Int8[np.ndarray, " T"]


def interleave(
    documents: Sequence[TokenisedDocument], chunk: int = 256
) -> list[LongInput]:
    """Pairs documents (0, 1), (2, 3), ... and alternates chunks of both.

    After the end of one, the rest of the other follows. An odd document at the end
    stays alone. All tokens occur once.

    Args:
        documents: in the order that pairs them.
        chunk: tokens between two switches; the paper has 256. The effect depends on its
            ratio to the segment of the model.

    Raises:
        ValueError: if chunk is below 1 or there is no document.
    """
    _check(documents, chunk)
    return [
        _alternate(documents[i : i + 2], chunk) for i in range(0, len(documents), 2)
    ]


def dilate(
    documents: Sequence[TokenisedDocument], filler: int, chunk: int = 256
) -> list[LongInput]:
    """Inserts `chunk` copies of a token after every `chunk` tokens of each document.

    A shorter last chunk has none after it.

    Args:
        documents: each becomes one text.
        filler: id of the token, in the paper that of "$".
        chunk: as for `interleave`.

    Raises:
        ValueError: if chunk is below 1, filler below 0 or there is no document.
    """
    check_sizes(least=0, filler=filler)
    _check(documents, chunk)
    return [_dilated(document, filler, chunk) for document in documents]


def _alternate(parts: Sequence[TokenisedDocument], chunk: int) -> LongInput:
    if len(parts) == 1:
        (part,) = parts
        return LongInput(part, np.zeros(len(part.tokens), np.int8))
    # Chunk c of part p comes (2c + p)th while both have chunks; a stable sort by this
    # number also orders the rest.
    number = np.concatenate(
        [2 * (np.arange(len(d.tokens)) // chunk) + p for p, d in enumerate(parts)]
    )
    order = np.argsort(number, kind="stable")
    tokens = np.concatenate([np.asarray(d.tokens) for d in parts])[order]
    origin = np.repeat(np.arange(2, dtype=np.int8), [len(d.tokens) for d in parts])
    kinds = dict.fromkeys(part.kind for part in parts)
    name = " + ".join(part.name for part in parts)
    document = TokenisedDocument(name, "+".join(kinds), tokens)
    return LongInput(document, origin[order])


def _dilated(document: TokenisedDocument, filler: int, chunk: int) -> LongInput:
    length = len(document.tokens)
    position = np.arange(length) + chunk * (np.arange(length) // chunk)
    total = length + chunk * (length // chunk)
    tokens: Int32[np.ndarray, " T"] = np.full(total, filler, np.int32)
    origin = np.full(total, FILLER, np.int8)
    tokens[position], origin[position] = document.tokens, 0
    return LongInput(document._replace(tokens=tokens), origin)


def _check(documents: Sequence[TokenisedDocument], chunk: int) -> None:
    check_sizes(chunk=chunk)
    require_all("documents", documents, TokenisedDocument)
    if not documents:
        raise ValueError("documents must hold at least one")
