"""The contract of a memory cell: gates, write and read, without a layer around them.

    init_params(key)                           -> params
    init_state(batch)                          -> memory
    step(params, memory, q, k, v, x [B, D])     -> (memory, y [B, H, V])
    apply(params, memory, q, k, v, x [B, T, D], reset) -> (memory, y [B, T, H, V])

Where q and k come with unit norm, `apply` takes None for the empty memory: a program
that knows it to be empty need not ask where in a chunk each batch element is. Where
`reset_chunk` is given, `apply` takes `reset` [B, T], which clears the memory of a batch
element before a token at a multiple of so many.

The layer gives queries q, keys k and values v of its heads, and the tokens x that the
gates are read from. `recurrent_block` puts convolution, projections, norm and output
gate around a cell, and so makes a mechanism of it. A cell keeps the law of mechanisms:
`apply` gives what T steps give, whatever the segments; the memory is float32 and has
the batch first in every leaf.

Shapes: B batch, T time, D model, H heads, G heads of keys and values, K key, V value.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from memjax.mechanisms.base import InitParams, InitState, reset
from memjax_kernels._src.common import one_pass


@runtime_checkable
class CellStep(Protocol):
    """Writes one token into the memory and reads: the definition of the cell."""

    def __call__(
        self,
        params: PyTree,
        memory: PyTree,
        q: Float[Array, "B H K"],
        k: Float[Array, "B G K"],
        v: Float[Array, "B G V"],
        x: Float[Array, "B D"],
        /,
    ) -> tuple[PyTree, Float[Array, "B H V"]]: ...


@runtime_checkable
class CellApply(Protocol):
    """Writes and reads a segment: what T steps give, computed faster."""

    def __call__(
        self,
        params: PyTree,
        memory: PyTree,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G V"],
        x: Float[Array, "B T D"],
        reset: Bool[Array, "B T"] | None = None,
        /,
    ) -> tuple[PyTree, Float[Array, "B T H V"]]: ...


class Cell(NamedTuple):
    """Four pure functions; the memory is a pytree that the caller carries.

    Attributes:
        init_params: draws the cell's learned weights.
        init_state: the empty memory.
        step: one token.
        apply: a segment.
        unit_norm: whether q and k come with unit norm, and G = H. Else they come as an
            attention layer has them, with G a divisor of H.
        reset_chunk: `reset` is taken at multiples of so many tokens; None takes none.
        apply_share: `apply` where each device has some of a segment's tokens, inside
            `divided_sequence.on_shares`; None where tokens cannot be divided.
    """

    init_params: InitParams
    init_state: InitState
    step: CellStep
    apply: CellApply
    unit_norm: bool = True
    reset_chunk: int | None = None
    apply_share: CellApply | None = None


@runtime_checkable
class CellConfig(Protocol):
    """What a layer asks of the configuration of its memory, a frozen dataclass."""

    @property
    def model_dim(self) -> int:
        """Width of the tokens x."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads that read."""
        ...

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        ...

    @property
    def value_dim(self) -> int:
        """Width of a head's values and reads."""
        ...

    def cell(self) -> Cell:
        """The memory of these sizes."""
        ...

    def cell_axes(self) -> PyTree:
        """How the cell's weights are divided; see `MechanismConfig.param_axes`."""
        ...


def bind(
    config: CellConfig,
    init_params: Callable,
    init_state: Callable,
    step: Callable,
    apply: Callable,
    *,
    unit_norm: bool = True,
    reset_chunk: int | None = None,
    apply_share: Callable | None = None,
) -> Cell:
    """The cell of one configuration, of functions that take the configuration first."""
    if apply_share is not None:
        apply_share = functools.partial(apply_share, config)
    return Cell(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
        unit_norm=unit_norm,
        reset_chunk=reset_chunk,
        apply_share=apply_share,
    )


class LearnedStart(NamedTuple):
    """A memory that starts from learned weights, which an empty state cannot know.

    Where `fresh`, `memory` holds zeros that `started` replaces before they are used.
    """

    memory: PyTree
    fresh: Bool[Array, " B"]


def unstarted(batch: int, memory: PyTree) -> LearnedStart:
    """A memory of this type, all of whose batch elements wait for their start.

    The start is learned, and an empty state knows no parameters: the first call fills
    it in.
    """
    # Each leaf its own buffer, so that a state can be donated.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    return LearnedStart(zeros, jnp.ones(batch, bool))


def started(state: LearnedStart, start: PyTree) -> PyTree:
    """The memory inside, with the learned `start` where it is fresh."""
    return reset(state.memory, start, state.fresh)


def step_from_start(
    op_step: Callable,
    tokens: Sequence[Float[Array, "B H ..."] | None],
    state: LearnedStart,
    start: PyTree,
    **options: Any,
) -> tuple[PyTree, Float[Array, "B H V"]]:
    """`op_step` on the memory of `started`, which does not pass over it once more.

    Args:
        op_step: (*tokens, memory, **options) -> (memory, y), one token of an op.
        tokens: its arguments before the memory.
        state: the memory before the token.
        start: the learned start, of one batch element.
        **options: of the step.
    """
    # A model in bfloat16 gives its parameters so; memories are float32.
    arrays = [
        leaf.astype(jnp.float32) for leaf in jax.tree.leaves(start) if leaf.ndim == 4
    ]
    where_fresh = lambda empty, leaf: jnp.where(
        state.fresh.reshape(-1, *[1] * (leaf.ndim - 1)), empty, leaf
    )
    # Numbers are started here, and arrays where the step reads them.
    memory = jax.tree.map(
        lambda leaf, empty: leaf if leaf.ndim == 4 else where_fresh(empty, leaf),
        state.memory,
        start,
    )

    given = (tokens, state.fresh, arrays, memory)
    return _start_and_step(*given, op_step=op_step, options=tuple(options.items()))


@one_pass.on_tpu
def _start_and_step(tokens, fresh, arrays, memory, *, op_step, options):
    """`op_step` on the memory, whose arrays are started where it is fresh."""
    left = iter(arrays)
    fresh = fresh[:, None, None, None]
    begun = jax.tree.map(
        lambda leaf: jnp.where(fresh, next(left), leaf) if leaf.ndim == 4 else leaf,
        memory,
    )
    return inspect.unwrap(op_step)(*tokens, begun, **dict(options))


def after_start(memory: PyTree) -> LearnedStart:
    """The state after a segment: nothing waits for its start any longer."""
    batch = jax.tree.leaves(memory)[0].shape[0]
    return LearnedStart(memory, jnp.zeros(batch, bool))
