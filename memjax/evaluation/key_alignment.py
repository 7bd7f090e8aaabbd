"""Key tokens of one tokenizer as those of another, by the text.

Fang et al. (2024), https://arxiv.org/abs/2410.23771, find key tokens with one model and
score others, whose tokens may differ.

Shapes: n tokens of a document.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from memjax.checks import require_instance
from memjax.data.documents.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    first_tokens,
)
from memjax.data.documents.tokens import TokenisedDocument
from memjax.evaluation.key_tokens import KeyTokens, digest_of


def align_key_tokens(
    keys: KeyTokens,
    documents: Sequence[TokenisedDocument],
    tokenizer: Tokenizer,
    others: Sequence[TokenisedDocument],
    other_tokenizer: Tokenizer,
) -> KeyTokens:
    """The same key tokens in the tokens of another tokenizer.

    A token is one if all its characters are those of key tokens, as in the paper's
    program.

    Args:
        keys: of `documents`.
        documents: tokens of `tokenizer`.
        tokenizer: that of the reference.
        others: the same texts in the same order, tokens of `other_tokenizer`.
        other_tokenizer: that of the model.

    Raises:
        ValueError: on other documents than those of the keys, on texts that differ, or
            a tokenizer whose tokens are not those of the text that they decode to.
    """
    require_instance("keys", keys, KeyTokens)
    if (tokenizer.digest, digest_of(documents)) != (keys.tokenizer, keys.content):
        raise ValueError("documents and tokenizer must be those of the keys")
    if len(others) != len(documents):
        raise ValueError(f"others must be {len(documents)}, got {len(others)}")
    found = []
    for key, document, other in zip(keys.keys, documents, others, strict=True):
        text, spans = _spans(tokenizer, document)
        same, other_spans = _spans(other_tokenizer, other)
        if text != same:
            raise ValueError(
                f"others must have the texts of documents; {document.name!r} and "
                f"{other.name!r} differ"
            )
        covered = np.zeros(len(text) + 1, np.int64)
        for start, stop in spans[key]:
            covered[start + 1 : stop + 1] = 1
        before = np.cumsum(covered)
        start, stop = other_spans.T
        found.append((stop > start) & (before[stop] - before[start] == stop - start))
    return KeyTokens(
        keys=tuple(found),
        documents=tuple(other.name for other in others),
        content=digest_of(others),
        tokenizer=other_tokenizer.digest,
    )


def _spans(
    tokenizer: Tokenizer, document: TokenisedDocument
) -> tuple[str, Int[np.ndarray, "n 2"]]:
    """The text, and the first and last characters of each token; none of added ones."""
    ids = np.asarray(document.tokens[:])
    added = len(first := first_tokens(tokenizer))
    added = added if np.array_equal(ids[:added], first) else 0
    text = tokenizer.decode(ids[added:])
    if isinstance(tokenizer, ByteTokenizer):
        # Bytes after the first of a character are 10xxxxxx.
        last = np.cumsum((ids & 0xC0) != 0x80)
        spans = np.stack([last - 1, last], axis=1)
    elif isinstance(tokenizer, JsonTokenizer):
        encoded = tokenizer.backend.encode(text, add_special_tokens=False)
        if encoded.ids != ids[added:].tolist():
            raise ValueError(
                f"{document.name!r} decodes to a text of other tokens, and cannot be "
                "aligned"
            )
        spans = np.asarray([(0, 0)] * added + encoded.offsets, np.int64)
    else:
        raise ValueError(f"{tokenizer!r} does not say where its tokens are in a text")
    return text, spans.reshape(-1, 2)
