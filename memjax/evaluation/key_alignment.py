"""Key tokens of one tokenizer as those of another, by the text.

Fang et al. (2024), https://arxiv.org/abs/2410.23771, find key tokens with one model and
score others, whose tokens may differ.

Shapes: n tokens of a document.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from memjax.checks import require_all, require_instance, short
from memjax.data.documents.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    encode_prompt,
    first_tokens,
)
from memjax.data.documents.tokens import TokenisedDocument
from memjax.evaluation.key_tokens import KeyTokens, digest_of, find_key_tokens
from memjax.models.base import Model

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTED})
#: Bytes by the characters that GPT-2's vocabulary writes for them.
BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + i): byte for i, byte in enumerate(_OTHERS)
}


def key_tokens_by(
    reference: Model,
    own: Tokenizer,
    texts: Sequence[TokenisedDocument],
    tokenizer: Tokenizer,
    **options: Any,
) -> KeyTokens:
    """Key tokens of texts by a reference whose tokenizer may differ from theirs.

    Then the texts are read in the reference's tokens, and its key tokens aligned; a
    text that begins or ends inside of a character has none.

    Args:
        reference: as in `find_key_tokens`.
        own: the reference's tokenizer.
        texts: as they are read, each with an empty memory.
        tokenizer: of the texts.
        options: others of `find_key_tokens`.

    Raises:
        ValueError: as in `find_key_tokens`, `retokenise` and `align_key_tokens`.
    """
    require_instance("own", own, Tokenizer)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_all("texts", texts, TokenisedDocument)
    if own.digest == tokenizer.digest:
        return find_key_tokens(reference, texts, tokenizer=own, **options)
    written = [_spans(tokenizer, text)[0] for text in texts]
    is_whole = [_decoded(text).encode() == text for text in written]
    whole = list(itertools.compress(texts, is_whole))
    read = retokenise(whole, tokenizer, own)
    keys = find_key_tokens(reference, read, tokenizer=own, **options)
    found = iter(align_key_tokens(keys, read, own, whole, tokenizer).keys)
    return KeyTokens(
        keys=tuple(
            next(found) if has else np.zeros(len(text.tokens), bool)
            for text, has in zip(texts, is_whole, strict=True)
        ),
        documents=tuple(text.name for text in texts),
        content=digest_of(texts),
        tokenizer=tokenizer.digest,
    )


def align_key_tokens(
    keys: KeyTokens,
    documents: Sequence[TokenisedDocument],
    tokenizer: Tokenizer,
    others: Sequence[TokenisedDocument],
    other_tokenizer: Tokenizer,
) -> KeyTokens:
    """The same key tokens in the tokens of another tokenizer.

    A token is one if all its bytes are in key tokens, as in the paper's program.

    Args:
        keys: of `documents`.
        documents: tokens of `tokenizer`.
        tokenizer: that of the reference.
        others: the same texts in the same order, tokens of `other_tokenizer`.
        other_tokenizer: that of the model.

    Raises:
        ValueError: on other documents than those of the keys, on texts that differ, or
            a tokenizer whose tokens are no parts of the text that they decode to.
    """
    require_instance("keys", keys, KeyTokens)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_instance("other_tokenizer", other_tokenizer, Tokenizer)
    require_all("documents", documents, TokenisedDocument)
    require_all("others", others, TokenisedDocument)
    if (tokenizer.digest, digest_of(documents)) != (keys.tokenizer, keys.content):
        raise ValueError("documents and tokenizer must be those of the keys")
    if len(others) != len(documents):
        raise ValueError(
            f"others must be the {len(documents)} texts of documents, got {len(others)}"
        )
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
        # Covered bytes before each.
        before = np.cumsum(covered)
        start, stop = other_spans.T
        found.append((stop > start) & (before[stop] - before[start] == stop - start))
    return KeyTokens(
        keys=tuple(found),
        documents=tuple(other.name for other in others),
        content=digest_of(others),
        tokenizer=other_tokenizer.digest,
    )


def retokenise(
    documents: Sequence[TokenisedDocument], tokenizer: Tokenizer, other: Tokenizer
) -> list[TokenisedDocument]:
    """The same texts in the tokens of `other`, behind those that it begins a text with.

    Raises:
        ValueError: on a text that begins or ends inside of a character, or a tokenizer
            whose tokens are no parts of the text that they decode to.
    """
    require_all("documents", documents, TokenisedDocument)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_instance("other", other, Tokenizer)
    found = []
    for document in documents:
        text, _ = _spans(tokenizer, document)
        try:
            ids = encode_prompt(other, text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"documents must be whole characters, {document.name!r} is not: {error}"
            ) from error
        found.append(document._replace(tokens=ids, digest=""))
    return found


def _spans(
    tokenizer: Tokenizer, document: TokenisedDocument
) -> tuple[bytes, Int[np.ndarray, "n 2"]]:
    """The text, and where each token begins and ends in it; nowhere of added ones."""
    ids = np.asarray(document.tokens[:])
    added = len(first := first_tokens(tokenizer))
    added = added if np.array_equal(ids[:added], first) else 0
    pieces = [b""] * added + [_piece(tokenizer, i) for i in ids[added:].tolist()]
    text = b"".join(pieces)
    read = tokenizer.decode(ids[added:])
    # Llama 2 puts a space before a text, and takes it away again.
    if text[:1] == b" " and _decoded(text[1:]) == read:
        pieces[added], text = pieces[added][1:], text[1:]
    elif _decoded(text) != read:
        raise ValueError(
            f"{document.name!r} is decoded to a text that is not made of its tokens, "
            f"and cannot be aligned: {short(read)}"
        )
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    stop = np.cumsum(lengths)
    return text, np.stack([stop - lengths, stop], axis=1)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _piece(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    if isinstance(tokenizer, ByteTokenizer):
        return bytes([token])
    if not isinstance(tokenizer, JsonTokenizer):
        raise ValueError(f"{tokenizer!r} does not say which bytes its tokens are")
    written = tokenizer.backend.id_to_token(token) or ""
    if token in tokenizer.backend.get_added_tokens_decoder():
        return written.encode()
    # Other characters are in no byte's writing: the library takes such tokens as text.
    if b'"ByteLevel"' in tokenizer.serialised and BYTES.keys() >= {*written}:
        return bytes(BYTES[character] for character in written)
    if re.fullmatch("<0x[0-9A-F]{2}>", written):
        return bytes([int(written[1:-1], 16)])
    return written.replace("\u2581", " ").encode()
