"""The documents of the comparison: those of `experiments.corpus.comparison`."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation.statistics import LEAST_DOCUMENTS

#: Kinds that are scored; the corpus has manuals in its training split alone.
KINDS = ("proofs", "code", "prose")


def documents(
    source: str,
    tokenizer: Tokenizer,
    split: Split,
    tokens: int,
    *,
    kinds: Sequence[str] = KINDS,
    least: int = LEAST_DOCUMENTS,
) -> list[TokenisedDocument]:
    """Documents of some kinds, in order of kind, cut to `tokens` targets each.

    Args:
        source: as `memjax train` takes it.
        tokenizer: of the model.
        split: to read.
        tokens: targets of each document; shorter documents are left out.
        kinds: to read.
        least: documents that each kind must have.

    Raises:
        ValueError: if a kind has fewer documents that are long enough.
    """
    found = [
        document._replace(tokens=np.asarray(document.tokens[: tokens + 1]))
        for document in load_tokens(source, tokenizer, split)
        if document.kind in kinds and len(document.tokens) > tokens
    ]
    counts = Counter(document.kind for document in found)
    for kind in kinds:
        if counts[kind] < least:
            raise ValueError(
                f"source={source!r} must have at least {least} documents of {kind!r} "
                f"with more than {tokens} tokens in its {split} split, "
                f"got {counts[kind]}"
            )
    return sorted(found, key=lambda document: kinds.index(document.kind))
