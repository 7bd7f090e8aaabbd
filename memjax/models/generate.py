"""Generate tokens: read the prompt into the state, then draw from it in a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from memjax.models.base import Model
from memjax.models.sampling import Sampling, draw


def generate(
    model: Model,
    state: PyTree,
    prompt: Int[np.ndarray, "B T"] | Int[Array, "B T"],
    max_new_tokens: int,
    *,
    key: PRNGKeyArray,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    segment: int = 1024,
) -> tuple[PyTree, Int[np.ndarray, "B N"]]:
    """Reads the prompt into the state and draws tokens one by one.

    The state has a fixed size, so neither the prompt's length nor the output's is
    bounded by memory; only full attention has a capacity.

    Args:
        model: the model.
        state: the memory to go on from, `model.init_state(B)` at a document's start.
        prompt: tokens in [0, V), T >= 1.
        max_new_tokens: how many to draw, at least 1.
        key: of the draws.
        sampling: greedy, temperature, top-k and top-p.
        segment: tokens read at a time; a multiple of the model's window is quick.

    Returns:
        The memory after prompt and all drawn tokens but the last, which has not been
        read; and the drawn tokens.

    Raises:
        ValueError: on an empty prompt, a token out of range, max_new_tokens or
            segment below 1, or more tokens than full attention has capacity for.
    """
    prompt = np.asarray(prompt)
    _check(model, state, prompt, max_new_tokens, segment)
    graph, params = nnx.split(model)
    features = None
    # One segment at a time: memory does not grow with the prompt.
    for start, stop in _segments(prompt.shape[1], segment):
        tokens = jnp.asarray(prompt[:, start:stop], jnp.int32)
        state, features = _prefill(graph, params, state, tokens)
    state, tokens = _decode(
        graph, sampling, max_new_tokens, params, state, features, key
    )
    return state, np.asarray(tokens)


def _segments(length: int, segment: int) -> list[tuple[int, int]]:
    """Bounds of the prompt's segments, none of one token unless the prompt is."""
    # HMT reads single tokens as generated ones, without a new summary.
    bounds = list(range(0, length, segment)) + [length]
    # A last segment of one token is joined to the one before it.
    if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
        del bounds[-2]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _prefill(graph, params, state, tokens):
    """The state after the tokens, and the features of the last."""
    model = nnx.merge(graph, params)
    state, features = model.features(state, tokens)
    # Logits of the other positions are of no use, and are the widest product.
    return state, features[:, -1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(graph, sampling, count, params, state, features, key):
    model = nnx.merge(graph, params)
    keys = jax.random.split(key, count)

    def decode(carry, key):
        state, token = carry
        state, logits = model(state, token[:, None])
        token = draw(logits[:, 0], key, sampling)
        return (state, token), token

    token = draw(model.logits(features), keys[0], sampling)
    (state, _), tokens = jax.lax.scan(decode, (state, token), keys[1:])
    return state, jnp.concatenate([token[:, None], tokens.T], axis=1)


def _check(model, state, prompt, max_new_tokens, segment):
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must be [B, T] with T >= 1, got {prompt.shape}")
    for name, value in (("max_new_tokens", max_new_tokens), ("segment", segment)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if prompt.min() < 0 or prompt.max() >= model.vocab_size:
        worst = prompt.max() if prompt.max() >= model.vocab_size else prompt.min()
        raise ValueError(
            f"prompt must hold tokens in [0, {model.vocab_size}), got {worst}"
        )
    # The last token drawn is not read.
    new, room = prompt.shape[1] + max_new_tokens - 1, model.remaining(state)
    if room is not None and new > room:
        raise ValueError(
            f"prompt and max_new_tokens make {new} tokens to read; full attention has "
            f"room for {room} more"
        )
