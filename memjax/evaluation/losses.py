"""Token losses and perplexity of long texts, with the memory carried between calls.

The loss of a token is that of the logits computed before it was read.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from memjax.checks import check_sizes, require_instance, require_known
from memjax.data.documents.tokens import TokenisedDocument
from memjax.models.base import Model, commit_state
from memjax.models.loss import target_nll


class TokenLosses(NamedTuple):
    """Losses of R texts of up to T tokens.

    Attributes:
        nll: [R, T] nats of the target at each position; 0 where there is none.
        mask: [R, T] 1 where there is a target.
        kinds: [R] kind of each text.
        documents: [R] name of the document that each text is from.
    """

    nll: Float32[np.ndarray, "R T"]
    mask: Float32[np.ndarray, "R T"]
    kinds: tuple[str, ...]
    documents: tuple[str, ...]


def token_losses(
    model: Model,
    documents: Sequence[TokenisedDocument],
    *,
    context_length: int = 0,
    tokens_per_call: int = 1024,
    batch_size: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokenLosses:
    """Loss of every token of the documents, read in calls.

    Args:
        model: any model, `(state, tokens) -> (state, logits)`.
        documents: whole texts.
        context_length: maximum tokens of the texts that documents are cut into, each
            read from an empty memory; 0 does not cut documents.
        tokens_per_call: tokens per call; a multiple of the model's window is fast.
        batch_size: texts per batch.
        should_stop: polled between calls; the losses so far are returned.
        progress: called after each call with targets done and in total.

    Raises:
        ValueError: if there is no target, or a size is out of range.
    """
    require_instance("model", model, Model)
    check_sizes(tokens_per_call=tokens_per_call, batch_size=batch_size)
    check_sizes(least=0, context_length=context_length)
    require_instance("documents", documents, Sequence)
    texts = cut_texts(documents, context_length)
    if not texts:
        raise ValueError(f"none of the {len(documents)} documents has two tokens")
    # Texts of similar length share a batch, which reduces padding.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    longest = max(len(text.tokens) for text in texts) - 1
    nll, mask = np.zeros((2, len(texts), longest), np.float32)
    found = TokenLosses(
        nll, mask, tuple(t.kind for t in texts), tuple(t.name for t in texts)
    )
    done, total = 0, sum(len(text.tokens) - 1 for text in texts)
    # The structure is static, so that one program serves all batches.
    graph, params = nnx.split(model)
    for first in range(0, len(texts), batch_size):
        rows = order[first : first + batch_size]
        length = max(len(texts[row].tokens) for row in rows) - 1
        # Padding after the texts' ends is read too.
        calls = -(-length // tokens_per_call)
        state = model.init_state(batch_size, calls * tokens_per_call)
        state = commit_state(params, state)
        for start in range(0, length, tokens_per_call):
            if should_stop():
                return found
            read: list[Any] = [texts[row].tokens for row in rows]
            tokens, targets, real = _segment(read, start, tokens_per_call, batch_size)
            state, scores = score_segment(graph, params, state, tokens, targets)
            stop = min(start + tokens_per_call, longest)
            kept = real[: len(rows), : stop - start]
            mask[rows, start:stop] = kept
            nll[rows, start:stop] = np.where(
                kept > 0, np.asarray(scores)[: len(rows), : stop - start], 0
            )
            done += int(kept.sum())
            progress(done, total)
    return found


def perplexity(
    losses: TokenLosses, *, kind: str | None = None, first: int = 0
) -> float:
    """exp of the mean loss over positions from `first` on, of one kind or of all.

    NaN without such a position.

    Raises:
        ValueError: on a kind that no text has.
    """
    require_instance("losses", losses, TokenLosses)
    require_known("kind", kind, (None, *sorted(set(losses.kinds))))
    rows = [i for i, k in enumerate(losses.kinds) if kind is None or k == kind]
    # Millions of terms: float32 sums would lose digits of the mean.
    tokens = losses.mask[rows, first:].sum(dtype=np.float64)
    total = losses.nll[rows, first:].sum(dtype=np.float64)
    return float(np.exp(total / tokens)) if tokens else float("nan")


def loss_by_position(losses: TokenLosses, edges: Sequence[int]) -> list[float]:
    """Mean loss in nats of the positions in [edges[i], edges[i+1]), NaN where none."""
    require_instance("losses", losses, TokenLosses)
    require_instance("edges", edges, Sequence)
    means = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        tokens = losses.mask[:, start:stop].sum(dtype=np.float64)
        total = losses.nll[:, start:stop].sum(dtype=np.float64)
        means.append(float(total / tokens) if tokens else float("nan"))
    return means


def log2_bins(longest: int, first: int = 16) -> list[int]:
    """Bin edges 0, first, 2 first, 4 first, ... that end at `longest`."""
    check_sizes(longest=longest, first=first)
    edges = [0]
    while first < longest:
        edges.append(first)
        first *= 2
    return [*edges, longest]


@functools.partial(jax.jit, static_argnums=0)
def score_segment(graph, params, state, tokens, targets) -> tuple[tuple, Array]:
    """State after a segment [B, T], and the losses of its targets [B, T]."""
    model = nnx.merge(graph, params)
    state, features = model.features(state, tokens)
    vocab_size = model.vocab_size
    return state, target_nll(model.logits, features, targets, vocab_size)


def cut_texts(
    documents: Sequence[TokenisedDocument], context_length: int
) -> list[TokenisedDocument]:
    """Documents cut to the context length; a text of n + 1 tokens has n targets."""
    texts = []
    for document in documents:
        require_instance("a document", document, TokenisedDocument)
        for start in (starts := text_starts(document, context_length)):
            # One token over: the last target of a text is the first of the next.
            tokens = document.tokens[start : start + starts.step + 1]
            texts.append(document._replace(tokens=tokens))
    return texts


def text_starts(document: TokenisedDocument, context_length: int) -> range:
    """Where each text of a document begins; the step is its greatest length."""
    length = len(document.tokens)
    return range(0, length - 1, context_length or max(length, 1))


def _segment(
    rows: list[Int32[np.ndarray, " _"]], start: int, length: int, batch: int
) -> tuple[Array, Array, Float32[np.ndarray, "B T"]]:
    """Inputs, targets and mask of one segment; short rows are padded with id 0."""
    tokens, targets = np.zeros((2, batch, length), np.int32)
    mask = np.zeros((batch, length), np.float32)
    for i, row in enumerate(rows):
        piece = row[start : start + length + 1]
        size = max(len(piece) - 1, 0)
        tokens[i, :size] = piece[:-1] if size else 0
        targets[i, :size] = piece[1:]
        mask[i, :size] = 1
    return jnp.asarray(tokens), jnp.asarray(targets), mask
