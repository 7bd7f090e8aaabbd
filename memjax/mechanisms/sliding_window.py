"""Attention to the last W tokens: the memory-free baseline.

    y_t = Σ_{t-W<s<=t} softmax_s(q_tᵀ k_s / √K) v_s        (RoPE on q and k)

Beltagy et al. (2020), https://arxiv.org/abs/2004.05150, section 3.1, causal.
RoPE depends on distances alone, so keys are kept without it and turned at their
place in the window: exact at any length of the stream.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
W window, Q queries a block.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.mechanisms import attend, projections
from memjax.mechanisms.base import Mechanism, check_input, check_sizes
from memjax.mechanisms.projections import AttentionParams, HeadsConfig


@dataclasses.dataclass(frozen=True)
class SlidingWindowConfig(HeadsConfig):
    """Sizes of a sliding-window layer.

    Attributes:
        window: tokens that a query sees, its own included.
    """

    window: int = 2048

    def __post_init__(self):
        super().__post_init__()
        check_sizes(window=self.window)


class SlidingWindowState(NamedTuple):
    """The last W keys (without RoPE) and values, newest last, in float32."""

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    filled: Int[Array, " B"]


def init_state(config: SlidingWindowConfig, batch: int) -> SlidingWindowState:
    """Returns a window with nothing in it."""
    shape = (batch, config.window, config.num_kv_heads, config.head_dim)
    return SlidingWindowState(
        keys=jnp.zeros(shape, jnp.float32),
        values=jnp.zeros(shape, jnp.float32),
        filled=jnp.zeros(batch, jnp.int32),
    )


def step(
    config: SlidingWindowConfig,
    params: AttentionParams,
    state: SlidingWindowState,
    x: Float[Array, "B D"],
) -> tuple[SlidingWindowState, Float[Array, "B D"]]:
    """Slides the window by one token and attends inside it."""
    state, y = apply(config, params, state, x[:, None])
    return state, y[:, 0]


def apply(
    config: SlidingWindowConfig,
    params: AttentionParams,
    state: SlidingWindowState,
    x: Float[Array, "B T D"],
) -> tuple[SlidingWindowState, Float[Array, "B T D"]]:
    """Attends in blocks of Q = min(W, T) queries to the W + Q keys around them."""
    check_input(x, config.model_dim, state)
    b, t, _ = x.shape
    window = config.window
    size = min(window, t)
    q, k, v = projections.project(params, x)
    keys = jnp.concatenate([state.keys, k.astype(jnp.float32)], axis=1)
    values = jnp.concatenate([state.values, v.astype(jnp.float32)], axis=1)

    pad = ((0, 0), (0, -t % size), (0, 0), (0, 0))
    queries = jnp.pad(q, pad).reshape(b, -1, size, *q.shape[2:])
    around = lambda stream: _around(jnp.pad(stream, pad), window, size).astype(x.dtype)
    places = jnp.arange(window + size, dtype=jnp.int32)
    y = attend.blocks(
        projections.turn(config, queries, places[window:]),
        projections.turn(config, around(keys), places),
        around(values),
        _visible(queries.shape[1], window, size, state.filled),
    )
    y = y.reshape(b, -1, *q.shape[2:])[:, :t]
    state = SlidingWindowState(
        keys=keys[:, t:],
        values=values[:, t:],
        filled=jnp.minimum(state.filled + t, window),
    )
    return state, projections.merge(params, y)


def _around(
    stream: Float[Array, "B T G K"], window: int, size: int
) -> Float[Array, "B n S G K"]:
    """The block's own tokens behind the W before them, for every block."""
    blocks = (stream.shape[1] - window) // size
    first = jnp.arange(blocks, dtype=jnp.int32)[:, None] * size
    return stream[:, first + jnp.arange(window + size, dtype=jnp.int32)[None]]


def _visible(blocks, window, size, filled):
    """Whether query i of a block sees key s: inside the window and not before it."""
    s = jnp.arange(window + size, dtype=jnp.int32)[None]
    i = jnp.arange(size, dtype=jnp.int32)[:, None]
    inside = (s > i) & (s <= window + i)
    first = jnp.arange(blocks, dtype=jnp.int32)[:, None] * size
    real = (first + s)[None] >= window - filled[:, None, None]
    return inside[None, None] & real[:, :, None]


def sliding_window(config: SlidingWindowConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(projections.init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )
