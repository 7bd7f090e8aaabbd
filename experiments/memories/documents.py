"""The documents of the comparison: those of `experiments.corpus.comparison`."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation.statistics import MIN_DOCUMENTS

#: Kinds that are scored; the corpus has manuals in its training split alone.
KINDS = ("proofs", "code", "prose")


def documents(
    source: str,
    tokenizer: Tokenizer,
    split: Split,
    tokens: int,
    *,
    kinds: Sequence[str] = KINDS,
    least: int = MIN_DOCUMENTS,
    long: int = 0,
    longest: int = 0,
) -> list[TokenisedDocument]:
    """Documents of some kinds, in order of kind, cut to `tokens` targets each.

    Args:
        source: as `memjax train` takes it.
        tokenizer: of the model.
        split: to read.
        tokens: targets of each document; shorter documents are left out.
        kinds: to read.
        least: documents that each kind must have.
        long: documents of each kind, the first by name, that have more targets:
        longest: so many.

    Raises:
        ValueError: if a kind has fewer documents that are long enough.
    """
    read, found = load_tokens(source, tokenizer, split), []
    for kind in kinds:
        cut = lambda some, size: some._replace(tokens=np.asarray(some.tokens[:size]))
        some = [x for x in read if x.kind == kind and len(x.tokens) > tokens]
        more = [x.name for x in some if len(x.tokens) > longest][:long]
        if len(more) < long:
            raise ValueError(
                f"source={source!r} must have {long} documents of {kind!r} with more "
                f"than {longest} tokens in its {split} split, got {len(more)}"
            )
        found += [cut(x, 1 + (longest if x.name in more else tokens)) for x in some]
    counts = Counter(document.kind for document in found)
    for kind in kinds:
        if counts[kind] < least:
            raise ValueError(
                f"source={source!r} must have at least {least} documents of {kind!r} "
                f"with more than {tokens} tokens in its {split} split, "
                f"got {counts[kind]}"
            )
    return found
