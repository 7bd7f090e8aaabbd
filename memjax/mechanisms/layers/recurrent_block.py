"""The Mamba-style block around every recurrent memory.

    [q, k] = silu(conv([W_q, W_k] x)), each divided by its norm          v = W_v x
    memory, y = core(x, q, k, v, memory)
    out = W_o (RMSNorm(y) ∘ GeLU(W_g x))

Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3, as Karami et al. draw it
for Trellis (figure 1) and Lattice (figure 2). The convolution is causal, depthwise
and of width 4; silu behind it is what Mamba has, and the papers do not name another.
Norms of q and k have 1e-6 added under the root.

What remembers is the core: four functions like a mechanism's, on heads instead of
channels. A core scales q where its memory wants that; every core gets unit q and k.

Shapes: B batch, T time, D model, H heads, K query and key, V value, W width of the
convolution, S projections that it filters (2, or 1 which query and key share).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import InitParams, InitState, Mechanism, check_input, reset
from memjax.mechanisms.layers.cpu import scale_channels, scale_rows
from memjax.mechanisms.layers.gates import draw_weight, unit

CONV_WIDTH = 4


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block.

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
        check_positive(norm_epsilon=self.norm_epsilon)


class CoreRun(Protocol):
    """Tokens into the memory: x for its gates, unit q and k, v.

    With a T axis after B in `Core.apply`, without one in `Core.step`. Reads have the
    shape and dtype of v.
    """

    def __call__(
        self,
        params: PyTree,
        memory: PyTree,
        x: Float[Array, "*B D"],
        q: Float[Array, "*B H K"],
        k: Float[Array, "*B H K"],
        v: Float[Array, "*B H V"],
        /,
    ) -> tuple[PyTree, Float[Array, "*B H V"]]: ...


class Core(NamedTuple):
    """What a recurrent mechanism puts into the block."""

    init_params: InitParams
    init_memory: InitState
    step: CoreRun
    apply: CoreRun


class BlockParams(NamedTuple):
    """Learned weights of a block; `core` are the mechanism's own."""

    query_key: Float[Array, "D S H K"]
    filters: Float[Array, "W 2 H K"]
    value: Float[Array, "D H V"]
    gate: Float[Array, "D H V"]
    norm: Float[Array, " V"]
    output: Float[Array, "H V D"]
    core: PyTree


class BlockState(NamedTuple):
    """The memory, and the inputs that the convolution still needs, in float32."""

    window: Float[Array, "B _ S H K"]
    memory: PyTree


class Memory(NamedTuple):
    """A memory that starts from learned weights, which no state can know.

    Where `fresh`, `memory` holds zeros that `started` replaces before they are used.
    """

    memory: PyTree
    fresh: Bool[Array, " B"]


def build(
    config: BlockConfig, core: Core, *, shared_projection: bool = False
) -> Mechanism:
    """Puts a core into the block.

    Args:
        config: sizes.
        core: the memory.
        shared_projection: whether query and key are two convolutions of one projection
            (Lattice) or each have their own.
    """
    projections = 1 if shared_projection else 2

    def init_params(key: PRNGKeyArray) -> BlockParams:
        return _init_params(config, core, projections, key)

    def init_state(batch: int) -> BlockState:
        heads = (projections, config.num_heads, config.key_dim)
        window = jnp.zeros((batch, CONV_WIDTH - 1, *heads), jnp.float32)
        return BlockState(window, core.init_memory(batch))

    def step(
        params: BlockParams, state: BlockState, x: Float[Array, "B D"]
    ) -> tuple[BlockState, Float[Array, "B D"]]:
        check_input(x, config.model_dim, state)
        window, *tokens = _project(params, state.window, x[:, None])
        memory, y = core.step(params.core, state.memory, x, *(t[:, 0] for t in tokens))
        return BlockState(window, memory), _merge(config, params, x, y)

    def apply(
        params: BlockParams, state: BlockState, x: Float[Array, "B T D"]
    ) -> tuple[BlockState, Float[Array, "B T D"]]:
        check_input(x, config.model_dim, state)
        window, *tokens = _project(params, state.window, x)
        memory, y = core.apply(params.core, state.memory, x, *tokens)
        return BlockState(window, memory), _merge(config, params, x, y)

    return Mechanism(init_params, init_state, step, apply)


def op_core(
    init_params: Callable[[PRNGKeyArray], PyTree],
    init_memory: Callable[[int], PyTree],
    arguments: Callable[..., tuple],
    op: Callable[..., tuple[PyTree, Array]],
    step: Callable[..., tuple[PyTree, Array]],
) -> Core:
    """A core whose memory is the state of an op.

    Args:
        init_params: draws the weights of the gates.
        init_memory: the op's empty state.
        arguments: (params, x, q, k, v) -> what the op takes before its state, of
            tokens with a T axis and without one.
        op: the op, with its options bound.
        step: one token of it.
    """

    def run(call):
        def tokens(params, memory, x, q, k, v):
            return call(*arguments(params, x, q, k, v), state=memory)

        return tokens

    return Core(init_params, init_memory, run(step), run(op))


def unstarted(batch: int, memory: PyTree) -> Memory:
    """A memory of this type whose rows all wait for their start."""
    # Each leaf its own buffer, so that a state can be donated.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    return Memory(zeros, jnp.ones(batch, bool))


def started(memory: Memory, start: PyTree) -> PyTree:
    """The memory with the learned `start`, of the same type, in its fresh rows."""
    return reset(memory.memory, start, memory.fresh)


def _init_params(config, core, projections, key):
    d, h = config.model_dim, config.num_heads
    k, v = config.key_dim, config.value_dim
    qk_key, filter_key, v_key, gate_key, out_key, core_key = jax.random.split(key, 6)
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
        core=core.init_params(core_key),
    )


def _project(params, window, x):
    """The window after the tokens of x [B, T, D], and their unit q, unit k and v."""
    t = x.shape[1]
    into = lambda weight: jnp.tensordot(x, weight.astype(x.dtype), 1)
    inputs = into(params.query_key).astype(jnp.float32)
    inputs = jnp.concatenate([window, inputs], axis=1)
    # With one shared projection its axis of 1 meets the 2 of the filters.
    taps = [
        inputs[:, w : w + t] * params.filters[w][None, None] for w in range(CONV_WIDTH)
    ]
    q_k = unit(jax.nn.silu(sum(taps[1:], taps[0]))).astype(x.dtype)
    return inputs[:, t:], q_k[:, :, 0], q_k[:, :, 1], into(params.value)


def _merge(config, params, x, y):
    """Norm, gate and output of the reads [*B, H, V] of the tokens x [*B, D]."""
    y = y.astype(jnp.float32)
    mean_square = (y**2).mean(axis=-1, keepdims=True)
    y = scale_rows(y, jax.lax.rsqrt(mean_square + config.norm_epsilon))
    y = scale_channels(y, params.norm)
    gate = jnp.tensordot(x, params.gate.astype(x.dtype), 1)
    y = y.astype(x.dtype) * jax.nn.gelu(gate)
    return jnp.tensordot(y, params.output.astype(x.dtype), 2)
