"""LongPPL: perplexity on the key tokens, those that need the long context.

    key(t):  log p(x_t | long) - log p(x_t | short) > α  and  log p(x_t | long) > β

p is a reference model's. The long context is all of a text before x_t, the short one
its last K to K + stride - 1 tokens. LongPPL of any model is its perplexity on these
tokens. Fang et al. (2024), https://arxiv.org/abs/2410.23771; α = 2, β = -2, K = 4096
and a stride of K/4 are those of the authors' program.

    keys = find_key_tokens(reference, documents, tokenizer=tokenizer)
    losses = token_losses(model, documents)
    perplexity(keep_key_tokens(losses, keys, documents, tokenizer=tokenizer))

Shapes: R texts, T targets, n tokens of a document.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from memjax.buckets.writing import replaced
from memjax.checks import check_numbers, check_sizes, require_all, require_instance
from memjax.data.documents.token_file import tokens_digest
from memjax.data.documents.tokenizer import Tokenizer
from memjax.data.documents.tokens import TokenisedDocument, default_cache_dir
from memjax.evaluation.leaked_targets import drop_leaked_targets, mask_losses
from memjax.evaluation.losses import (
    TokenLosses,
    cut_texts,
    text_starts,
    token_losses,
)
from memjax.models.base import Model
from memjax.models.checkpoints.fingerprint import fingerprint

#: Of the paper.
SHORT_CONTEXT = 4096


class KeyTokens(NamedTuple):
    """Key tokens of documents.

    Attributes:
        keys: [n] of each document, True at its key tokens.
        documents: their names.
        content: a digest of the tokens of all documents.
        tokenizer: the digest of the tokenizer whose tokens they are.
    """

    keys: tuple[Bool[np.ndarray, " _"], ...]
    documents: tuple[str, ...]
    content: str
    tokenizer: str

    @property
    def total(self) -> int:
        """Number of key tokens."""
        return sum(int(key.sum()) for key in self.keys)


def digest_of(documents: Sequence[TokenisedDocument]) -> str:
    """`KeyTokens.content`: of the tokens as they are, cut documents too."""
    found = "".join(tokens_digest(document) for document in documents)
    return hashlib.sha256(found.encode()).hexdigest()[:32]


def find_key_tokens(
    reference: Model,
    documents: Sequence[TokenisedDocument],
    *,
    tokenizer: Tokenizer,
    context_length: int = 0,
    short_context: int | None = None,
    stride: int | None = None,
    alpha: float = 2.0,
    beta: float = -2.0,
    tokens_per_call: int = 1024,
    batch_size: int = 8,
    cache_dir: Path | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> KeyTokens:
    """Finds the tokens that the reference predicts by the long context alone.

    They are stored by documents, reference and settings, and found once. The first
    K + `stride` tokens of a text are no key tokens: both contexts are all before them.

    Args:
        reference: a model that uses contexts as long as the texts.
        documents: whole texts.
        tokenizer: that of the reference, which the documents are tokens of.
        context_length: maximum tokens of the texts that documents are cut into; 0 does
            not cut them.
        short_context: K, the fewest tokens of a short context; None is 4096, or half of
            the longest text where that is less.
        stride: neighbouring tokens whose short contexts begin at the same token; None
            is a quarter of K.
        alpha: least gain in log-probability by the long context, in nats.
        beta: least log-probability with the long context, in nats.
        tokens_per_call: see `token_losses`.
        batch_size: texts per batch.
        cache_dir: None is where `load_tokens` keeps tokens.
        progress: called after each call with targets done and in total, once for the
            long and once for the short contexts.

    Raises:
        ValueError: if no document has `context_length` tokens, or more than
            `short_context`; if the reference has fewer ids than the tokenizer, or
            cannot hold a text; on a size or threshold out of range.
    """
    require_instance("reference", reference, Model)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_all("documents", documents, TokenisedDocument)
    check_sizes(least=0, context_length=context_length)
    check_sizes(tokens_per_call=tokens_per_call, batch_size=batch_size)
    check_numbers(alpha=alpha, beta=beta)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if math.isnan(value):
            raise ValueError(f"{name} must be a number, got {value}")
    if reference.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"reference has {reference.vocab_size} ids and tokenizer "
            f"{tokenizer.vocab_size}: it must be the reference's own"
        )
    _require_ids(documents, tokenizer)
    short = _short_context(documents, context_length, short_context)
    stride = max(1, short // 4) if stride is None else stride
    check_sizes(stride=stride)
    content = digest_of(documents)
    settings = (context_length, short, stride, float(alpha), float(beta))
    said = (content, tokenizer.digest, fingerprint(reference), *map(repr, settings))
    name = hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir)
    file = folder / "key_tokens" / f"{name}.npy"
    if not file.is_file():
        # Before the work: a file of that name has no room for one.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cache_dir must be a folder that can be written, got {folder}"
            raise ValueError(why) from error
        calls: Any = dict(
            tokens_per_call=tokens_per_call, batch_size=batch_size, progress=progress
        )
        texts = cut_texts(documents, context_length)
        losses = token_losses(reference, texts, **calls)
        predicted = drop_leaked_targets(reference, losses).mask > 0
        full = losses.nll
        gain = _short_losses(reference, texts, short, stride, calls) - full
        by_text = (gain > alpha) & (-full > beta) & predicted
        with replaced(file) as stream:
            flat = np.concatenate(_by_document(by_text, documents, context_length))
            np.save(stream, np.packbits(flat), allow_pickle=False)
    ends = np.cumsum([len(document.tokens) for document in documents])
    return KeyTokens(
        keys=tuple(np.split(_read(file, int(ends[-1])), ends[:-1])),
        documents=tuple(document.name for document in documents),
        content=content,
        tokenizer=tokenizer.digest,
    )


def keep_key_tokens(
    losses: TokenLosses,
    keys: KeyTokens,
    documents: Sequence[TokenisedDocument],
    *,
    tokenizer: Tokenizer,
    context_length: int = 0,
    least: int = 100,
) -> TokenLosses:
    """Losses of the key tokens, all others masked: `perplexity` of them is LongPPL.

    Args:
        losses: of any model, on `documents`.
        keys: of the same documents.
        documents: those that the losses are of.
        tokenizer: that of the model.
        context_length: as in `token_losses`.
        least: fewest key tokens that make a perplexity.

    Raises:
        ValueError: on another tokenizer or other documents than those of the keys, on
            losses of other texts, and on fewer key tokens than `least`.
    """
    require_instance("losses", losses, TokenLosses)
    require_instance("keys", keys, KeyTokens)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_all("documents", documents, TokenisedDocument)
    # Not by `check_sizes`, of which `least` is the bound.
    require_instance("least", least, int)
    if least < 1:
        raise ValueError(f"least must be at least 1, got {least}")
    if tokenizer.digest != keys.tokenizer:
        raise ValueError(
            f"keys are of the tokenizer {keys.tokenizer[:12]!r}, and this one is "
            f"{tokenizer.digest[:12]!r}: align_key_tokens(keys, documents, "
            "their tokenizer, the same documents in this one's tokens (`retokenise`), "
            "this one) finds the tokens of the same words"
        )
    if digest_of(documents) != keys.content:
        raise ValueError("documents must be those of the keys, got others")
    texts = cut_texts(documents, context_length)
    shape = (len(texts), max((len(text.tokens) for text in texts), default=1) - 1)
    if losses.mask.shape != shape:
        raise ValueError(
            f"losses must be {list(shape)}, of these documents cut to context_length="
            f"{context_length}, got {list(losses.mask.shape)}"
        )
    mask = np.zeros(shape, np.float32)
    rows = iter(mask)
    for document, keys_of_it in zip(documents, keys.keys, strict=True):
        for start in (starts := text_starts(document, context_length)):
            key = keys_of_it[start + 1 : start + 1 + starts.step]
            next(rows)[: len(key)] = key
    kept = mask_losses(losses, mask)
    count = int(kept.mask.sum())
    if count < least:
        raise ValueError(
            f"least={least} key tokens are needed, got {count} of {keys.total}: give "
            "more documents or longer ones, or a smaller alpha or short_context"
        )
    return kept


def _require_ids(documents, tokenizer):
    """Raises ValueError on tokens that the tokenizer does not have."""
    for document in documents:
        tokens = np.asarray(document.tokens)
        low, high = tokens.min(initial=0), tokens.max(initial=0)
        is_whole = np.issubdtype(tokens.dtype, np.integer)
        if not is_whole or low < 0 or high >= tokenizer.vocab_size:
            raise ValueError(
                "documents must be tokens of the tokenizer, integers in [0, "
                f"{tokenizer.vocab_size}), got {document.name!r} with {tokens.dtype} "
                f"from {low} to {high}"
            )


def _read(file, count):
    """The stored keys of `count` tokens, [count]."""
    try:
        packed = np.load(file, allow_pickle=False)
        if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):
            raise ValueError(f"it has {packed.dtype}{list(packed.shape)}")
    # A file that ends at once has no header.
    except (ValueError, EOFError) as error:
        why = f"{file} is damaged, remove it: it must have the keys of {count} tokens"
        raise ValueError(why) from error
    return np.unpackbits(packed, count=count).astype(bool)


def _short_context(documents, context_length, asked):
    """K, which the longest text must exceed."""
    if not documents:
        raise ValueError("documents must have at least one, got none")
    longest = max(len(document.tokens) for document in documents)
    if longest < max(context_length, 2):
        raise ValueError(
            f"context_length={context_length} is longer than every document: the "
            f"longest of {len(documents)} has {longest} tokens"
        )
    longest = min(longest, context_length + 1) if context_length else longest
    if asked is None:
        asked = max(1, min(SHORT_CONTEXT, longest // 2))
    check_sizes(short_context=asked)
    if asked >= longest - 1:
        raise ValueError(
            f"short_context must be below the {longest - 1} tokens before the last of "
            f"the longest text, got {asked}"
        )
    return asked


def _short_losses(reference, texts, short_context, stride, calls):
    """Losses [R, T] with short contexts; -inf before the first."""
    windows, places = [], []
    longest = max(len(text.tokens) for text in texts) - 1
    nll = np.full((len(texts), longest), -np.inf, np.float32)
    for row, text in enumerate(texts):
        # Token start + K is the first of a window that has K tokens before it.
        for start in range(0, len(text.tokens) - short_context, stride):
            tokens = text.tokens[start : start + short_context + stride]
            windows.append(text._replace(tokens=tokens, digest=""))
            places.append((row, start + short_context - 1, len(tokens) - short_context))
    losses = token_losses(reference, windows, **calls)
    for (row, first, count), found in zip(places, losses.nll, strict=True):
        known = found[short_context - 1 : short_context - 1 + count]
        nll[row, first : first + count] = known
    return nll


def _by_document(by_text, documents, context_length):
    """Keys of targets [R, T] as those of the tokens of each document."""
    rows, found = iter(by_text), []
    for document in documents:
        found.append(np.zeros(len(document.tokens), bool))
        for start in (starts := text_starts(document, context_length)):
            # A target is the token behind its position.
            key = found[-1][start + 1 : start + 1 + starts.step]
            key[:] = next(rows)[: len(key)]
    return found
