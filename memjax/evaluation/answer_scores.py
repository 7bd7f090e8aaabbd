"""Loss and exact match of answers that follow long inputs.

Answers are scored with teacher forcing. An answer matches exactly, and greedy decoding
gives it, if each of its tokens is the most likely one. The model must not read ahead at
the answer: `memjax.data.align` ensures that for HMT.

Shapes: B batch, T time, A tokens of an answer, E features, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float32

from memjax.checks import check_sizes, require_all, require_instance
from memjax.data.tasks.questions import QuestionInput
from memjax.models.base import Model, commit_state


class AnswerScores(NamedTuple):
    """Scores of R answers of up to A tokens.

    Attributes:
        nll: [R, A] nats of each token, 0 after an answer's end.
        mask: [R, A] 1 where the answer has a token.
        exact: [R] whether each of its tokens is the most likely.
    """

    nll: Float32[np.ndarray, "R A"]
    mask: Float32[np.ndarray, "R A"]
    exact: Bool[np.ndarray, " R"]


def score_answers(
    model: Model,
    inputs: Sequence[QuestionInput],
    *,
    tokens_per_call: int,
    batch_size: int = 4,
) -> AnswerScores:
    """Scores the answer of each input, read from an empty memory.

    Args:
        model: any model, `(state, tokens) -> (state, logits)`.
        inputs: of `multi_context`; aligned to the model's segments if it reads ahead.
        tokens_per_call: of a model with segments a multiple of theirs.
        batch_size: inputs per batch, padded to the longest.

    Raises:
        ValueError: if there is no input, an answer is empty or has no token before it,
            or a size is below 1.
    """
    require_instance("model", model, Model)
    _check(inputs, tokens_per_call, batch_size)
    order = sorted(range(len(inputs)), key=lambda i: len(inputs[i].tokens))
    longest = max(len(entry.tokens) - entry.answer for entry in inputs)
    nll, mask = np.zeros((2, len(inputs), longest), np.float32)
    right = np.zeros((len(inputs), longest), bool)
    graph, params = nnx.split(model)
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        # The last batch is filled by repeating its last input.
        batch = [inputs[row] for row in (rows + rows[-1:] * batch_size)[:batch_size]]
        tokens, places, targets, real = _batch(batch, tokens_per_call, longest)
        state = model.init_state(batch_size, tokens.shape[1])
        seen = np.zeros((batch_size, longest, model.width), np.float32)
        state, seen = commit_state(params, (state, jnp.asarray(seen)))
        for start in range(0, tokens.shape[1], tokens_per_call):
            part = jnp.asarray(tokens[:, start : start + tokens_per_call])
            positions = places - start
            state, seen = _read_segment(graph, params, state, part, positions, seen)
        scores, likeliest = _score(graph, params, seen, jnp.asarray(targets))
        count = len(rows)
        mask[rows] = real[:count]
        nll[rows] = np.asarray(scores)[:count] * real[:count]
        right[rows] = (np.asarray(likeliest) | (real == 0))[:count]
    return AnswerScores(nll, mask, np.asarray(right.all(axis=1)))


def answer_perplexity(
    answers: AnswerScores, rows: Sequence[int] | None = None
) -> float:
    """Perplexity of the answers' tokens, over all rows or those given."""
    require_instance("answers", answers, AnswerScores)
    rows = range(len(answers.mask)) if rows is None else rows
    tokens = answers.mask[list(rows)].sum(dtype=np.float64)
    total = answers.nll[list(rows)].sum(dtype=np.float64)
    return float(np.exp(total / tokens)) if tokens else float("nan")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 5))
def _read_segment(graph, params, state, tokens, places, seen):
    """Reads a segment; returns its state and the features that predict answers."""
    model = nnx.merge(graph, params)
    state, features = model.features(state, tokens)
    inside = (places >= 0) & (places < tokens.shape[1])
    # Answers in other segments are clipped here and masked below.
    index = jnp.clip(places, 0, tokens.shape[1] - 1)[..., None]
    found = jnp.take_along_axis(features, index, axis=1)
    return state, jnp.where(inside[..., None], found.astype(seen.dtype), seen)


@functools.partial(jax.jit, static_argnums=0)
def _score(graph, params, seen, targets):
    logits = nnx.merge(graph, params).logits(seen)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # Without forming the log-softmax of all V tokens.
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    return nll, jnp.argmax(logits, axis=-1) == targets


def _batch(batch: Sequence[QuestionInput], tokens_per_call: int, longest: int):
    """Tokens padded to whole segments, and positions, targets, mask of the answers."""
    most = max(len(entry.tokens) for entry in batch)
    length = -(-most // tokens_per_call) * tokens_per_call
    tokens = np.zeros((len(batch), length), np.int32)
    places = np.full((len(batch), longest), -1, np.int32)
    targets = np.zeros((len(batch), longest), np.int32)
    for row, entry in enumerate(batch):
        end = len(entry.tokens)
        tokens[row, :end] = entry.tokens
        # Token t is predicted by the features of t - 1.
        places[row, : end - entry.answer] = np.arange(entry.answer, end) - 1
        targets[row, : end - entry.answer] = entry.tokens[entry.answer :]
    return tokens, places, targets, (places >= 0).astype(np.float32)


def _check(inputs, tokens_per_call, batch_size):
    check_sizes(tokens_per_call=tokens_per_call, batch_size=batch_size)
    require_all("inputs", inputs, QuestionInput)
    if not inputs:
        raise ValueError("inputs must hold at least one")
    for i, entry in enumerate(inputs):
        if not 0 < entry.answer < len(entry.tokens):
            raise ValueError(
                f"inputs[{i}]: the answer must begin inside its {len(entry.tokens)} "
                f"tokens, got {entry.answer}"
            )
