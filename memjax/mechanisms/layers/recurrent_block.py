"""The Mamba-style block around every recurrent memory.

    [q, k] = silu(conv([W_q, W_k] x)), each divided by its norm          v = W_v x
    memory, y = op(q, k, v, gates of x, memory)
    out = W_o (RMSNorm(y) ∘ GeLU(W_g x))

Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3, as Karami et al. draw it
for Trellis (figure 1) and Lattice (figure 2). The convolution is causal, depthwise
and of width 4; silu behind it is what Mamba has, and the papers do not name another.
Norms of q and k have 1e-6 added under the root.

A mechanism calls `qkv_projection`, its op, and `output_projection`. It scales q where
its memory wants that; q and k come with unit norm.

Shapes: B batch, T time, D model, H heads, K query and key, V value, W width of the
convolution, S projections that it filters (2, or 1 which query and key share).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import axes, check_input, reset
from memjax.mechanisms.layers.cpu import scale_channels, scale_rows
from memjax.mechanisms.layers.gates import draw_weight, l2_normalize

CONV_WIDTH = 4


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Sizes that all recurrent mechanisms have.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: heads, each with its own memory.
        key_dim: width of a head's queries and keys.
        value_dim: width of a head's values and reads.
        norm_epsilon: of the RMSNorm behind the memory.
    """

    model_dim: int
    num_heads: int
    key_dim: int
    value_dim: int
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        check_sizes(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
        check_positive(most=1.0, norm_epsilon=self.norm_epsilon)


class BlockParams(NamedTuple):
    """Learned weights of a block; `core` are the mechanism's own."""

    query_key: Float[Array, "D S H K"]
    filters: Float[Array, "W 2 H K"]
    value: Float[Array, "D H V"]
    gate: Float[Array, "D H V"]
    norm: Float[Array, " V"]
    output: Float[Array, "H V D"]
    core: PyTree


def param_axes(core: PyTree) -> BlockParams:
    """How a block is divided among devices, given its core's axes.

    See `MixerConfig.param_axes`.
    """
    return BlockParams(
        query_key=axes("model", None, "heads"),
        filters=axes(None, None, "heads"),
        value=axes("model", "heads"),
        gate=axes("model", "heads"),
        norm=axes(),
        output=axes("heads", None, "model"),
        core=core,
    )


class BlockState(NamedTuple):
    """The memory, and the inputs that the convolution still needs, in float32."""

    window: Float[Array, "B _ S H K"]
    memory: PyTree


class QKV(NamedTuple):
    """The window after the tokens; their queries and keys of unit norm; values."""

    window: Float[Array, "B _ S H K"]
    q: Float[Array, "*B H K"]
    k: Float[Array, "*B H K"]
    v: Float[Array, "*B H V"]


def core_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of a mechanism's own weights, independent of the block's."""
    # `init_params` splits the same six, and draws the block with the other five.
    return jax.random.split(key, 6)[5]


def init_params(
    config: RecurrentConfig,
    core: PyTree,
    key: PRNGKeyArray,
    *,
    shared_projection: bool = False,
) -> BlockParams:
    """Draws a block's weights.

    Args:
        config: sizes.
        core: the mechanism's own weights, drawn with `core_key(key)`.
        key: of the block.
        shared_projection: whether query and key are two convolutions of one projection
            (Lattice) or each have their own.
    """
    d, h = config.model_dim, config.num_heads
    k, v = config.key_dim, config.value_dim
    projections = 1 if shared_projection else 2
    qk_key, filter_key, v_key, gate_key, out_key, _ = jax.random.split(key, 6)
    # A depthwise filter has a fan-in of its width alone.
    bound = CONV_WIDTH**-0.5
    return BlockParams(
        query_key=draw_weight(qk_key, d, projections, h, k),
        filters=jax.random.uniform(
            filter_key, (CONV_WIDTH, 2, h, k), minval=-bound, maxval=bound
        ),
        value=draw_weight(v_key, d, h, v),
        gate=draw_weight(gate_key, d, h, v),
        norm=jnp.ones(v),
        output=jax.random.normal(out_key, (h, v, d)) * (h * v) ** -0.5,
        core=core,
    )


def init_state(
    config: RecurrentConfig,
    batch: int,
    memory: PyTree,
    *,
    shared_projection: bool = False,
) -> BlockState:
    """The empty `memory` of a batch, and a convolution that saw nothing yet."""
    projections = 1 if shared_projection else 2
    heads = (projections, config.num_heads, config.key_dim)
    return BlockState(jnp.zeros((batch, CONV_WIDTH - 1, *heads), jnp.float32), memory)


def qkv_projection(
    config: RecurrentConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> QKV:
    """Queries, keys and values of a segment, in the dtype of x.

    Raises:
        ValueError: unless x is floating, with the state's batch size and the model's
            width.
    """
    check_input(x, config.model_dim, state)
    t = x.shape[1]
    into = lambda weight: jnp.tensordot(x, weight.astype(x.dtype), 1)
    # In float32 as the window is: a token counts alike whether it came in this call or
    # before.
    inputs = into(params.query_key).astype(jnp.float32)
    inputs = jnp.concatenate([state.window, inputs], axis=1)
    # With one shared projection its axis of 1 meets the 2 of the filters.
    taps = [
        inputs[:, w : w + t] * params.filters[w][None, None] for w in range(CONV_WIDTH)
    ]
    # Unit norm bounds what a write can do: a step of γ |k|² <= 2 does not diverge.
    q_k = l2_normalize(jax.nn.silu(sum(taps[1:], taps[0]))).astype(x.dtype)
    return QKV(inputs[:, t:], q_k[:, :, 0], q_k[:, :, 1], into(params.value))


def qkv_projection_step(
    config: RecurrentConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> QKV:
    """`qkv_projection` of one token."""
    window, q, k, v = qkv_projection(config, params, state, x[:, None])
    return QKV(window, q[:, 0], k[:, 0], v[:, 0])


def output_projection(
    config: RecurrentConfig,
    params: BlockParams,
    x: Float[Array, "*B D"],
    y: Float[Array, "*B H V"],
) -> Float[Array, "*B D"]:
    """Norm, gate and output matrix of the reads y of the tokens x."""
    y = y.astype(jnp.float32)
    mean_square = (y**2).mean(axis=-1, keepdims=True)
    # RMSNorm makes the output independent of the memory's size, which grows with the
    # text.
    y = scale_rows(y, jax.lax.rsqrt(mean_square + config.norm_epsilon))
    y = scale_channels(y, params.norm)
    gate = jnp.tensordot(x, params.gate.astype(x.dtype), 1)
    y = y.astype(x.dtype) * jax.nn.gelu(gate)
    return jnp.tensordot(y, params.output.astype(x.dtype), 2)


class LearnedStart(NamedTuple):
    """A memory that starts from learned weights, which an empty state cannot know.

    Where `fresh`, `memory` holds zeros that `started` replaces before they are used.
    """

    memory: PyTree
    fresh: Bool[Array, " B"]


def unstarted(batch: int, memory: PyTree) -> LearnedStart:
    """A memory of this type, all of whose batch elements wait for their start."""
    # Each leaf its own buffer, so that a state can be donated.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    return LearnedStart(zeros, jnp.ones(batch, bool))


def started(state: BlockState, start: PyTree) -> PyTree:
    """The block's memory, with the learned `start` where it is fresh."""
    return reset(state.memory.memory, start, state.memory.fresh)


def after_start(
    window: Float[Array, "B _ S H K"], memory: PyTree, state: BlockState
) -> BlockState:
    """The state after a segment: nothing waits for its start any longer."""
    return BlockState(window, LearnedStart(memory, jnp.zeros_like(state.memory.fresh)))
