"""The state of Lattice: the chunk-start memory, and the tokens since."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memjax_kernels._src.common.arguments import check_choice, check_shapes, check_sizes
from memjax_kernels._src.common.steps import open_chunk

LatticeVariant = Literal["dec", "enc", "sim"]
LatticeForget = Literal["l2", "l1"]
LatticeInitial = Literal["orthonormal", "normalised"]

LATTICE_VARIANTS: tuple[LatticeVariant, ...] = ("dec", "enc", "sim")


class Rule(NamedTuple):
    """Static options of the recurrence, the same for every token.

    Attributes:
        variant: the objective, "dec" (eq. 6), "enc" (eq. 9) or "sim" (eq. 11).
        normalize: whether slots are put back on the unit sphere (eq. 14).
        forget: None, "l2" (eq. 16) or "l1" (eq. 18).
    """

    variant: LatticeVariant = "dec"
    normalize: bool = True
    forget: LatticeForget | None = None

    @property
    def without_kernel(self) -> str:
        """Why no kernel has these equations; "" if kernels have them."""
        if not self.normalize:
            return f"normalize must be True, got {self.normalize}"
        return (
            "" if self.forget is None else f"forget must be None, got {self.forget!r}"
        )


# Annotated Any because jax rebuilds pytrees around things that are not arrays, and
# annotations are checked while the tests run.
class LatticeTokens(NamedTuple):
    """Tokens of a chunk: k [*B, C, M], v [*B, C, V], gamma and g [*B, C]."""

    k: Any
    v: Any
    gamma: Any
    g: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatticeState:
    """The memory of B batch elements and H heads: M slots of width V.

    Attributes:
        start: float32 [B, H, M, V], the memory at the start of the open chunk; slots
            of unit norm, unless the recurrence is not normalised.
        tokens: of the open chunk, float32 with an axis of C and zeros behind the last;
            None where C = 1.
        position: int32 [B], their number, in [0, chunk_size).
        chunk_size: C, static.
    """

    start: Any
    tokens: Any
    position: Any
    chunk_size: int = dataclasses.field(metadata={"static": True})


def lattice_init_state(
    batch: int,
    heads: int,
    slots: int,
    value_dim: int,
    chunk_size: int = 16,
    *,
    initial: LatticeInitial | None = None,
) -> LatticeState:
    """The memory before the first token: the same fixed random slots every time.

    Heads differ, batch elements do not. The paper (section 3.3) starts from orthonormal
    slots, of which there are at most `value_dim`.

    Args:
        batch: B.
        heads: H.
        slots: M.
        value_dim: V, the width of a slot.
        chunk_size: C.
        initial: "orthonormal" slots, or "normalised": independent random ones of unit
            norm. None is "orthonormal" where slots <= value_dim, else "normalised".

    Raises:
        ValueError: on a size below 1, an unknown `initial`, or orthonormal slots that
            are more than `value_dim`.
    """
    sizes = {"batch": batch, "heads": heads, "slots": slots, "value_dim": value_dim}
    check_sizes(**sizes, chunk_size=chunk_size)
    check_choice("initial", initial, (None, "orthonormal", "normalised"))
    if initial == "orthonormal" and slots > value_dim:
        raise ValueError(
            f"initial='orthonormal' needs slots <= value_dim={value_dim}, got slots="
            f"{slots}; initial='normalised' takes random rows of unit norm instead, as "
            "None does here"
        )
    if initial is None:
        initial = "orthonormal" if slots <= value_dim else "normalised"
    rows = jnp.asarray(_unit_rows(heads, slots, value_dim, initial), jnp.float32)
    return lattice_state(jnp.repeat(rows[None], batch, axis=0), chunk_size)


def lattice_state(start: Any, chunk_size: int) -> LatticeState:
    """The state at a chunk's start whose memory is `start` [B, H, M, V]."""
    check_shapes(start=(start, "B H M V"))
    check_sizes(chunk_size=chunk_size)
    b, h, m, v = start.shape
    one = LatticeTokens((b, h, m), (b, h, v), (b, h), (b, h))
    return LatticeState(
        start=start,
        tokens=open_chunk.empty(chunk_size, one),
        position=jnp.zeros(b, jnp.int32),
        chunk_size=chunk_size,
    )


def _unit_rows(
    heads: int, slots: int, width: int, initial: LatticeInitial
) -> np.ndarray:
    """[H, M, V] in float64, from a generator whose stream is frozen."""
    # Not jax.random: its streams may change between versions, and this memory may not.
    rows = np.random.RandomState(0).standard_normal((heads, slots, width))
    if initial == "normalised":
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    basis, triangle = np.linalg.qr(np.swapaxes(rows, 1, 2))
    # Signs that do not depend on the LAPACK at hand.
    signs = np.sign(np.diagonal(triangle, axis1=1, axis2=2))
    return np.swapaxes(basis * signs[:, None], 1, 2)
