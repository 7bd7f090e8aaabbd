"""The Mamba-style block around a recurrent cell.

    [q, k] = silu(conv([W_q, W_k] x)), each divided by its norm          v = W_v x
    memory, y = cell(q, k, v, x, memory)
    out = W_o (RMSNorm(y) ∘ GeLU(W_g x))

Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3, as Karami et al. draw it
for Trellis (figure 1) and Lattice (figure 2). The convolution is causal, depthwise
and of width 4, followed by silu as in Mamba; the papers name no other.
Norms of q and k have 1e-6 added under the root.

`mechanism` puts this block around a cell (`cells.base`): gates, write and read. q and k
have unit norm; a cell may scale q.

Shapes: B batch, T time, D model, H heads, K query and key, V value, W width of the
convolution, S projections that it filters (2, or 1 which query and key share).
"""

import abc
import dataclasses
import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from memjax.checks import check_flags, check_positive, check_sizes, require_known
from memjax.mechanisms.base import Mechanism, Packed, axes, check_input
from memjax.mechanisms.cells.base import Cell, CellDefaults
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.divided_sequence import (
    is_first,
    last_of_previous,
    on_shares,
)
from memjax.mechanisms.layers.gates import draw_weight, flat_product
from memjax_kernels import gated_norm, short_convolution
from memjax_kernels._src.common.partition import (
    by_tokens,
    channels_by_heads,
    sequence_ways,
)

CONV_WIDTH = 4
# Available in every op.
Implementation = Literal["reference", "xla"]


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(CellDefaults, MechanismDefaults, abc.ABC):
    """Sizes of all recurrent mechanisms, and the block around their cell.

    A mechanism adds its `cell()` and `cell_axes()`.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: heads, each with its own memory.
        key_dim: width of a head's queries and keys.
        value_dim: width of a head's values and reads.
        norm_epsilon: of the RMSNorm behind the memory.
        implementation: of a segment, with equal results: None is the fastest of the op,
            "xla" goes chunk by chunk, "reference" token by token.
    """

    model_dim: int
    num_heads: int
    key_dim: int
    value_dim: int
    norm_epsilon: float = 1e-5
    implementation: Implementation | None = None

    def __post_init__(self):
        check_flags(self)
        check_sizes(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
        check_positive(most=1.0, norm_epsilon=self.norm_epsilon)
        known = (None, *get_args(Implementation))
        require_known("implementation", self.implementation, known)

    @abc.abstractmethod
    def cell(self) -> Cell:
        """The memory of these sizes, without the block."""

    @abc.abstractmethod
    def cell_axes(self) -> PyTree:
        """Sharding axes of the cell; see `MechanismConfig.param_axes`."""

    @property
    def divides_tokens(self) -> bool:
        """Whether the cell can join the shares of several devices."""
        return self.cell().apply_share is not None

    def build(self) -> Mechanism:
        """The mechanism of these sizes: the block around the cell."""
        return mechanism(self, self.cell())

    def param_axes(self) -> "BlockParams":
        """Sharding axes of the parameters."""
        return BlockParams(
            query_key=axes("model", None, "heads"),
            filters=axes(None, None, "heads"),
            value=axes("model", "heads"),
            gate=axes("model", "heads"),
            norm=axes(),
            output=axes("heads", None, "model"),
            cell=self.cell_axes(),
        )


class BlockParams(NamedTuple):
    """Learned parameters of a block and of its cell."""

    query_key: Float[Array, "D S H K"]
    filters: Float[Array, "W 2 H K"]
    value: Float[Array, "D H V"]
    gate: Float[Array, "D H V"]
    norm: Float[Array, " V"]
    output: Float[Array, "H V D"]
    cell: PyTree


class BlockState(NamedTuple):
    """The memory, and the last inputs of the convolution, in float32."""

    window: Float[Array, "B _ S H K"]
    memory: PyTree


class QKV(NamedTuple):
    """Last inputs of the convolution; queries and keys of unit norm; values."""

    window: Float[Array, "B _ S H K"]
    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]


def mechanism(
    config: RecurrentConfig, cell: Cell, *, shared_projection: bool = False
) -> Mechanism:
    """The block around a memory cell.

    Args:
        config: sizes.
        cell: the memory, which takes q and k of unit norm.
        shared_projection: whether query and key are two convolutions of one projection
            (Lattice) or each have their own.
    """
    projections = 1 if shared_projection else 2
    packed = None
    if cell.reset_chunk is not None:
        packed = Packed(functools.partial(_whole, config, cell), cell.reset_chunk)
    return Mechanism(
        init_params=functools.partial(init_params, config, cell, projections),
        init_state=functools.partial(init_state, config, cell, projections),
        step=functools.partial(step, config, cell),
        apply=functools.partial(apply, config, cell),
        whole=functools.partial(whole, config, cell),
        packed=packed,
    )


def init_params(
    config: RecurrentConfig, cell: Cell, projections: int, key: PRNGKeyArray
) -> BlockParams:
    """Draws the weights of the block and of its memory."""
    d, h = config.model_dim, config.num_heads
    k, v = config.key_dim, config.value_dim
    # Separate keys: with one seed, all mechanisms have the same block weights.
    keys = jax.random.split(key, 6)
    qk_key, filter_key, v_key, gate_key, out_key, cell_key = keys
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
        cell=cell.init_params(cell_key),
    )


def init_state(
    config: RecurrentConfig, cell: Cell, projections: int, batch: int
) -> BlockState:
    """The empty memory and a convolution without inputs."""
    return BlockState(_no_inputs(config, projections, batch), cell.init_state(batch))


def step(
    config: RecurrentConfig,
    cell: Cell,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """One token: the memory's step between the projections."""
    # A segment of one, whose axis of time goes again.
    window, *qkv = qkv_projection(config, params, state, x[:, None])
    q, k, v = (z[:, 0] for z in qkv)
    memory, y = cell.step(params.cell, state.memory, q, k, v, x)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: RecurrentConfig,
    cell: Cell,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """A segment: equal to T steps."""
    return _read(config, cell, params, state, x)


def whole(
    config: RecurrentConfig,
    cell: Cell,
    params: BlockParams,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Outputs of a full sequence: `apply` of the empty state.

    Raises:
        ValueError: on a mask: a compressed token cannot be left out.
    """
    if mask is not None:
        raise ValueError("mask must be None with a mechanism that compresses, got one")
    return _whole(config, cell, params, x)


def _whole(config, cell, params, x, starts=None):
    """A full sequence, or packed rows with documents that begin at `starts`."""
    flags = None
    if starts is not None:
        documents.check_starts(starts, x)
        flags = (starts, documents.positions(starts))
    window = _no_inputs(config, params.query_key.shape[1], x.shape[0])
    return _read(config, cell, params, BlockState(window, None), x, flags)[1]


def _read(config, cell, params, state, x, flags=None):
    """The state after a segment, and its outputs.

    flags: of packed rows, where documents start and the tokens' positions in them.
    """
    ways = sequence_ways(x.shape[1])
    # The convolution of a device sees tokens of the one before it, and of no other.
    divided = ways > 1 and x.shape[1] >= ways * (CONV_WIDTH - 1)
    if divided and cell.apply_share is not None:
        share = functools.partial(_read_share, config, cell)
        return on_shares(share, (params, state), (x, flags))
    return _segment(config, cell.apply, params, state, x, flags)


def _read_share(config, cell, fixed, tokens):
    """`_read` of this device's share of the tokens."""
    (params, state), (x, flags) = fixed, tokens
    # The convolution needs the last inputs of the previous device.
    empty = state._replace(window=jnp.zeros_like(state.window))
    before = last_of_previous(x, CONV_WIDTH - 1)
    window = qkv_projection(config, params, empty, before).window
    state = state._replace(window=jnp.where(is_first(), state.window, window))
    return _segment(config, cell.apply_share, params, state, x, flags)


def _segment(config, read, params, state, x, flags):
    """The memory's `read` between the projections."""
    starts, positions = flags or (None, None)
    resets = () if starts is None else (starts,)
    window, q, k, v = qkv_projection(config, params, state, x, positions)
    memory, y = read(params.cell, state.memory, q, k, v, x, *resets)
    return BlockState(window, memory), output_projection(config, params, x, y)


def _no_inputs(config, projections, batch):
    """Zeros for the inputs before a sequence."""
    inputs = (CONV_WIDTH - 1, projections, config.num_heads, config.key_dim)
    return jnp.zeros((batch, *inputs), jnp.float32)


def qkv_projection(
    config: RecurrentConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"] | None = None,
) -> QKV:
    """Queries, keys and values of a segment, in the dtype of x.

    `positions` of each token in its document, before which inputs of the convolution
    are zeros; None is one document.

    Raises:
        ValueError: unless x is floating, with the state's batch size and the model's
            width.
    """
    check_input(x, config.model_dim, state)
    _, projections, heads, _ = params.query_key.shape

    def by_head(z):
        return z.reshape(*x.shape[:2], heads, -1)

    def project(weight):
        return by_head(channels_by_heads(flat_product(x, weight), heads))

    # Two products, where one would have to be cut in two again.
    inputs = [project(params.query_key[:, i]) for i in range(projections)]
    before = [state.window[:, :, i] for i in range(projections)]
    # One projection that both share, or one for each. Unit norm bounds what a write can
    # do: a step of γ |k|² <= 2 does not diverge.
    q, k = (
        short_convolution(
            inputs[i % projections],
            params.filters[:, i],
            before[i % projections],
            positions,
        )
        for i in range(2)
    )
    window = [
        jnp.concatenate([old, part[:, 1 - CONV_WIDTH :].astype(jnp.float32)], axis=1)
        for old, part in zip(before, inputs, strict=True)
    ]
    window = jnp.stack([part[:, 1 - CONV_WIDTH :] for part in window], axis=2)
    return QKV(window, q, k, project(params.value))


def output_projection(
    config: RecurrentConfig,
    params: BlockParams,
    x: Float[Array, "*B D"],
    y: Float[Array, "*B H V"],
) -> Float[Array, "*B D"]:
    """Norm, gate and output matrix of the reads y of the tokens x."""
    # RMSNorm makes the output independent of the memory's size, which grows with the
    # text.
    tokens = y if x.ndim == 3 else y[:, None]
    gate = flat_product(x, params.gate).reshape(tokens.shape)
    tokens = gated_norm(by_tokens(tokens), gate, params.norm, config.norm_epsilon)
    y = tokens.reshape(*x.shape[:-1], -1)
    return y @ params.output.reshape(-1, config.model_dim).astype(x.dtype)
