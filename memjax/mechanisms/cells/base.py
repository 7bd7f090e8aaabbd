"""The contract of a cell: a memory of keys and values, without a layer around it.

    init_params(key)                           -> params
    init_state(batch)                          -> memory
    step(params, memory, q, k, v, x [B, D])     -> (memory, y [B, H, V])
    apply(params, memory, q, k, v, x [B, T, D], reset) -> (memory, y [B, T, H, V])

The layer computes queries q, keys k and values v of its heads; x are the tokens that
gates read. `layers.recurrent.block` makes a mechanism of a cell by convolution,
projections, norm and output gate; `hybrid` puts one next to a window. A cell obeys the
law of mechanisms: `apply` equals T steps, whatever the segments, and the memory is
float32 with the batch first in every leaf.

With `unit_norm`, `apply` takes None for the empty memory, so that a program which knows
it to be empty need not ask for each batch element's place in its chunk. With
`reset_chunk`, it takes `reset` [B, T], which clears the memory of a batch element
before a token at a multiple of that number.

Shapes: B batch, T time, D model, H heads, G heads of keys and values, K key, V value.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, PyTree

from memjax.mechanisms.base import InitParams, InitState


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
    """Writes and reads a segment: equal to T steps, computed faster."""

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
        init_params: draws the cell's learned parameters.
        init_state: the empty memory.
        step: one token.
        apply: a segment.
        unit_norm: whether q and k come with unit norm, and G = H. Otherwise they are
            those of an attention layer, and G divides H.
        reset_chunk: `reset` is taken at multiples of this many tokens; None for never.
        shares_keys: whether `apply` takes q and k of G heads with unit norm too, G
            dividing H. Others get a copy for each head.
        apply_share: `apply` of one device's share of the tokens, inside
            `divided_sequence.on_shares`; None if tokens cannot be divided.
        convolved: `apply` of q, k and v before their convolutions, which also gives the
            last inputs of these; None if it is no faster.
    """

    init_params: InitParams
    init_state: InitState
    step: CellStep
    apply: CellApply
    unit_norm: bool = True
    reset_chunk: int | None = None
    apply_share: CellApply | None = None
    shares_keys: bool = False
    convolved: Callable[..., Any] | None = None


@runtime_checkable
class CellConfig(Protocol):
    """Configuration of a cell: a frozen dataclass.

    `memjax.mechanisms.CELLS` lists those of the package by name. `CellDefaults` has
    the optional members.
    """

    name: ClassVar[str]

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
        """The cell of these sizes."""
        ...

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters; see `MechanismConfig.param_axes`."""
        ...

    def with_half_lives(
        self,
        params: PyTree,
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> PyTree:
        """Initialises the gates for a hybrid of a pretrained model's layer.

        Gates that forget get half-lives between two lengths, each head (of GSA each
        slot) a longer one than the head before; a write would vanish within tokens
        otherwise.

        Args:
            params: of the cell.
            half_lives: the shortest and the longest, in tokens.
            constant: a weight whose product with any token x is about 1.
        """
        ...


class CellDefaults:
    """Optional members of `CellConfig`: no gate forgets."""

    def with_half_lives(
        self,
        params: PyTree,
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> PyTree:
        """The same parameters."""
        return params


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
    shares_keys: bool = False,
    convolved: Callable | None = None,
) -> Cell:
    """The cell of a configuration, from functions that take the configuration first."""
    if apply_share is not None:
        apply_share = functools.partial(apply_share, config)
    if convolved is not None:
        convolved = functools.partial(convolved, config)
    return Cell(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
        unit_norm=unit_norm,
        reset_chunk=reset_chunk,
        apply_share=apply_share,
        shares_keys=shares_keys,
        convolved=convolved,
    )
