"""Attention to the last W tokens: the memory-free baseline.

    y_t = Σ_{t-W<s<=t} softmax_s(q_tᵀ k_s / √K) v_s        (RoPE on q and k)

Beltagy et al. (2020), https://arxiv.org/abs/2004.05150, section 3.1, causal.
RoPE depends on distances alone, so keys are kept without it and rotated by their
position in the window: exact at any length of the stream.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
W window, Q queries a block.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from memjax.checks import check_sizes
from memjax.mechanisms.attention import whole as whole_attention
from memjax.mechanisms.base import Cache, Mechanism, check_input
from memjax.mechanisms.layers import dot_product_attention as attend
from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.projections import AttentionParams, HeadsConfig


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

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return sliding_window(self)

    def param_axes(self) -> AttentionParams:
        """How the projections are divided among devices."""
        return projections.AXES


class SlidingWindowState(NamedTuple):
    """The last W keys (without RoPE) and values, newest last."""

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    visible: Bool[Array, "B W"]  # False at masked tokens and before the first


def init_state(
    config: SlidingWindowConfig, batch: int, dtype: DTypeLike = jnp.float32
) -> SlidingWindowState:
    """Returns a window with nothing in it."""
    shape = (batch, config.window, config.num_kv_heads, config.head_dim)
    return SlidingWindowState(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        visible=jnp.zeros((batch, config.window), bool),
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
    mask: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[SlidingWindowState, Float[Array, "B T D"]]:
    """Attends in blocks of Q = min(W, T) queries to the W + Q keys around them.

    See `ApplyMasked` for mask and lengths.
    """
    check_input(x, config.model_dim, state)
    b, t, _ = x.shape
    window = config.window
    # Blocks as long as the window: each query scores at most 2 W keys.
    size = min(window, t)
    q, k, v = projections.qkv_projection(config, params, x)
    new = SlidingWindowState(
        keys=k.astype(state.keys.dtype),
        values=v.astype(state.values.dtype),
        visible=jnp.ones((b, t), bool) if mask is None else mask,
    )
    join = lambda old, new: jnp.concatenate([old, new], axis=1)
    stream = SlidingWindowState(*map(join, state, new))

    queries = _pad(q, -t % size).reshape(b, -1, size, *q.shape[2:])
    keys, values, visible = (_around(_pad(x, -t % size), window, size) for x in stream)
    positions = jnp.arange(window + size, dtype=jnp.int32)
    # RoPE depends on distances alone, so positions count from the start of the window:
    # they stay small at any length of the stream.
    y = attend.blocks(
        projections.apply_rope(config, queries, positions[window:]),
        # Keys are kept without RoPE and rotated here, at their position in the window.
        projections.apply_rope(config, keys.astype(x.dtype), positions),
        values.astype(x.dtype),
        _band(window, size)[None, None] & visible[:, :, None],
    )
    y = y.reshape(b, -1, *q.shape[2:])[:, :t]
    if lengths is None:
        newest = lambda leaf: leaf[:, t:]
    else:
        # Batch elements end at lengths of their own, and the padding behind them is not
        # kept.
        cut = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, window, 0)
        newest = lambda leaf: jax.vmap(cut)(leaf, lengths)
    state = SlidingWindowState(*map(newest, stream))
    return state, projections.output_projection(params, y)


def _pad(x: Array, more: int) -> Array:
    """Zeros behind the tokens [B, T, ...]."""
    return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))


def _around(stream: Array, window: int, size: int) -> Array:
    """The block's own tokens behind the W before them: [B, n, W + Q, ...]."""
    # The W tokens before a block and the block itself hold every key that its queries
    # see.
    blocks = (stream.shape[1] - window) // size
    first = jnp.arange(blocks, dtype=jnp.int32)[:, None] * size
    return stream[:, first + jnp.arange(window + size, dtype=jnp.int32)[None]]


def _band(window: int, size: int) -> Bool[Array, "Q S"]:
    """Whether query i of a block may see key s: inside its window and not after it."""
    s = jnp.arange(window + size, dtype=jnp.int32)[None]
    i = jnp.arange(size, dtype=jnp.int32)[:, None]
    return (s > i) & (s <= window + i)


def whole(
    config: SlidingWindowConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """A whole sequence, without a state; full attention if it fits in the window."""
    # No window and no state to build: full attention sees the same keys.
    if x.shape[1] <= config.window:
        return whole_attention(config, params, x, mask)
    return apply(config, params, init_state(config, x.shape[0]), x, mask)[1]


def sliding_window(config: SlidingWindowConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(projections.init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
        apply_masked=functools.partial(apply, config),
        whole=functools.partial(whole, config),
        cache=Cache(lambda batch, slots, dtype: init_state(config, batch, dtype)),
    )
