"""The Mamba-style block around a recurrent cell.

    [q, k] = silu(conv([W_q, W_k] x)), each divided by its norm          v = W_v x
    memory, y = cell(q, k, v, x, memory)
    out = W_o (RMSNorm(y) ∘ GeLU(W_g x))

Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3, as Karami et al. draw it
for Trellis (figure 1) and Lattice (figure 2). The convolution is causal, depthwise
and of width 4, followed by silu as in Mamba; the papers name no other.
Norms of q and k have 1e-6 added under the root. `RecurrentStyle` has what published
models do otherwise.

`mechanism` puts this block around a cell (`cells.base`): gates, write and read. q and k
have unit norm; a cell may scale q.

Shapes: B batch, T time, D model, H heads, G heads of queries and keys (H unless the
style says otherwise), K query and key, V value, W width of the convolution, S
projections that it filters (2, or 1 which query and key share).
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.mechanisms.base import Mechanism, Packed, refuse_mask
from memjax.mechanisms.cells.base import Cell, CellDefaults
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.divided_sequence import (
    is_first,
    last_of_previous,
    on_shares,
)
from memjax.mechanisms.layers.recurrent.projections import (
    BlockParams,
    BlockState,
    cell_input,
    for_each_value,
    init_params,
    no_inputs,
    output_projection,
    param_axes,
    part_shape,
    qkv_projection,
    unconvolved,
)
from memjax.mechanisms.layers.recurrent.style import RecurrentSizes
from memjax_kernels._src.common.partition import sequence_ways


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(RecurrentSizes, CellDefaults, MechanismDefaults, abc.ABC):
    """Sizes of all recurrent mechanisms, and the block around their cell.

    A mechanism adds its `cell()` and `cell_axes()`. See `RecurrentSizes`.
    """

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

    def param_axes(self) -> BlockParams:
        """Sharding axes of the parameters."""
        return param_axes(self, self.cell_axes())


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


def init_state(
    config: RecurrentConfig, cell: Cell, projections: int, batch: int
) -> BlockState:
    """The empty memory and a convolution without inputs."""
    window, values = no_inputs(config, projections, batch)
    return BlockState(window, cell.init_state(batch), values)


def step(
    config: RecurrentConfig,
    cell: Cell,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """One token: the memory's step between the projections."""
    # A segment of one, whose axis of time goes again.
    state, qkv = qkv_projection(config, params, state, x[:, None])
    q, k, v = (z[:, 0] for z in qkv)
    q, k = for_each_value(config, q), for_each_value(config, k)
    memory, y = cell.step(params.cell, state.memory, q, k, v, cell_input(config, x))
    return state._replace(memory=memory), output_projection(config, params, x, y)


def apply(
    config: RecurrentConfig,
    cell: Cell,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
    flags: tuple[Bool[Array, "B T"], Int[Array, "B T"]] | None = None,
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """A segment: equal to T steps.

    flags: of packed rows, where documents start and the tokens' positions in them.
    """
    ways = sequence_ways(x.shape[1])
    # The convolution of a device sees tokens of the one before it, and of no other.
    divided = ways > 1 and x.shape[1] >= ways * config.style.conv_inputs
    if divided and cell.apply_share is not None:
        share = functools.partial(_apply_share, config, cell)
        return on_shares(share, (params, state), (x, flags))
    starts, positions = flags or (None, None)
    resets = () if starts is None else (starts,)
    if cell.convolved is not None:
        given = unconvolved(config, params, state, x)
        if given is not None:
            seen = cell_input(config, x)
            memory, (*window, values), y = cell.convolved(
                params.cell, state.memory, given, seen, *resets
            )
            state = BlockState(jnp.stack(window, axis=2), memory, values)
            return state, output_projection(config, params, x, y)
    state, (q, k, v) = qkv_projection(config, params, state, x, positions)
    if not cell.shares_keys:
        q, k = for_each_value(config, q), for_each_value(config, k)
    seen = cell_input(config, x)
    memory, y = cell.apply(params.cell, state.memory, q, k, v, seen, *resets)
    return state._replace(memory=memory), output_projection(config, params, x, y)


def _apply_share(config, cell, fixed, tokens):
    """`apply` of this device's share of the tokens."""
    (params, state), (x, flags) = fixed, tokens
    before = config.style.conv_inputs
    if before:
        # The convolution needs the last inputs of the previous device.
        windows = state._replace(memory=None)
        empty = jax.tree.map(jnp.zeros_like, windows)
        previous, _ = qkv_projection(config, params, empty, last_of_previous(x, before))
        chosen = jax.tree.map(
            lambda first, last: jnp.where(is_first(), first, last), windows, previous
        )
        state = chosen._replace(memory=state.memory)
    # Its memory is joined to others, which `convolved` does not.
    cell = cell._replace(apply=cell.apply_share, convolved=None)
    return apply(config, cell, params, state, x, flags)


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
    refuse_mask(mask)
    return _whole(config, cell, params, x)


def _whole(config, cell, params, x, starts=None):
    """A full sequence, or packed rows with documents that begin at `starts`."""
    flags = None
    if starts is not None:
        documents.check_starts(starts, x)
        flags = (starts, documents.positions(starts))
    projections = part_shape(params.query_key)[1]
    window, values = no_inputs(config, projections, x.shape[0])
    return apply(config, cell, params, BlockState(window, None, values), x, flags)[1]
