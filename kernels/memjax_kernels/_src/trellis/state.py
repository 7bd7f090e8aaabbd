"""The state of Trellis between calls: both chunk-start memories, and the tokens since.

Gradients are taken at the memory of the chunk's start. The memory now follows from it
and the tokens since.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_sizes
from memjax_kernels._src.common.steps import open_chunk


class Rule(NamedTuple):
    """Static options of the recurrence: those of `trellis`."""

    phi: str = "l2_silu"
    activation: str = "ln_silu"
    bound_steps: bool = False
    normalize: bool = False


# Fields are Any: jax also builds these classes around shapes, shardings and axes.
class TrellisTokens(NamedTuple):
    """Tokens of a chunk: k, v, alpha [*B, C, D], and gates of each pass [*B, C]."""

    k: Any
    v: Any
    alpha: Any
    key_gamma: Any
    value_gamma: Any
    key_g: Any
    value_g: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrellisState:
    """Memories of both passes.

    Attributes:
        keys: the key memory at the start of the open chunk, Float32[B, H, M, K].
        values: the value memory there, Float32[B, H, M, V].
        tokens: of the open chunk, float32 with an axis of C and zeros behind the last;
            None where C = 1.
        position: their number, Int32[B], in [0, chunk_size).
        chunk_size: C. Static: a state of another chunk size is another function's.
    """

    keys: Any
    values: Any
    tokens: Any
    position: Any
    chunk_size: int = dataclasses.field(metadata={"static": True})


def trellis_state(
    keys: Float[Array, "B H M K"], values: Float[Array, "B H M V"], chunk_size: int
) -> TrellisState:
    """The state at a chunk's start of these memories."""
    check_sizes(chunk_size=chunk_size)
    (b, h, m, key), value = keys.shape, values.shape[-1]
    gates = ((b, h),) * 4
    one = TrellisTokens((b, h, key), (b, h, value), (b, h, m), *gates)
    tokens = open_chunk.empty(chunk_size, one)
    return TrellisState(keys, values, tokens, jnp.zeros(b, jnp.int32), chunk_size)


def empty_memory(slots: int, width: int) -> Float[Array, "M D"]:
    """The matrix that an empty memory holds: all its singular values are 1.

    The corner of the orthonormal cosine transform (DCT-II) of size max(M, D): its rows
    are orthonormal for M <= D, its columns for M >= D.
    """
    # Not zero, where the gradient of a normalised phi is singular, and not random, so
    # that it needs no key.
    size = max(slots, width)
    angle = np.pi * np.outer(np.arange(slots), np.arange(width) + 0.5) / size
    matrix = np.sqrt(2 / size) * np.cos(angle)
    # The DCT's constant row is longer than the others by √2.
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, jnp.float32)


def trellis_init_state(
    batch: int,
    heads: int,
    slots: int,
    key_dim: int,
    value_dim: int,
    chunk_size: int = 64,
) -> TrellisState:
    """The empty memory of `trellis`: `empty_memory` for every batch element and head.

    Raises:
        ValueError: on a size below 1.
    """
    widths = {"key_dim": key_dim, "value_dim": value_dim}
    check_sizes(batch=batch, heads=heads, slots=slots, **widths)

    def memory(width):
        return jnp.broadcast_to(
            empty_memory(slots, width), (batch, heads, slots, width)
        )

    return trellis_state(memory(key_dim), memory(value_dim), chunk_size)
