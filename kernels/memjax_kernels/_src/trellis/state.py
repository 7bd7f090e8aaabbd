"""The state of Trellis between calls.

Gradients are taken at the memory of the chunk's start. So a state holds that memory
and the running one, and each batch element's position in its chunk. At position 0 the
two memories are equal.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_sizes


class Memories(NamedTuple):
    """The key memory and the value memory, each at the chunk's start and now.

    Attributes:
        start: Float32[B, H, M, K] and [B, H, M, V] at the chunk's start, in which
            gradients are taken.
        running: likewise, the ones to write to and read from.
    """

    start: tuple[Any, Any]
    running: tuple[Any, Any]


def may_differ(memories: Memories) -> bool:
    """Whether a chunk may find another running memory than the one at its start.

    Not where they are the very same arrays: every batch element starts a chunk.
    """
    return any(a is not b for a, b in zip(*memories, strict=True))


# Fields are Any: jax also builds these classes around shapes, shardings and axes.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrellisState:
    """Memories of both passes.

    Attributes:
        keys_start: the key memory at the chunk's start, Float32[B, H, M, K].
        keys: the key memory now, Float32[B, H, M, K].
        values_start: the value memory at the chunk's start, Float32[B, H, M, V].
        values: the value memory now, Float32[B, H, M, V].
        position: tokens of the chunk so far, Int32[B], in [0, chunk_size).
        chunk_size: C. Static: a state of another chunk size is another function's.
    """

    keys_start: Any
    keys: Any
    values_start: Any
    values: Any
    position: Any
    chunk_size: int = dataclasses.field(metadata={"static": True})

    @property
    def memories(self) -> Memories:
        return Memories((self.keys_start, self.values_start), (self.keys, self.values))

    @classmethod
    def of(cls, memories: Memories, position, chunk_size: int) -> "TrellisState":
        (keys_start, values_start), (keys, values) = memories
        return cls(keys_start, keys, values_start, values, position, chunk_size)


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
    keys = _rows(batch=batch, heads=heads, slots=slots, width=key_dim)
    values = _rows(batch=batch, heads=heads, slots=slots, width=value_dim)
    position = _positions(batch, chunk_size)
    return TrellisState(keys, keys, values, values, position, chunk_size)


def _rows(**sizes: int) -> Float[Array, "B H M D"]:
    check_sizes(**sizes)
    batch, heads, slots, width = sizes.values()
    matrix = empty_memory(slots, width)[None, None]
    return jnp.broadcast_to(matrix, (batch, heads, slots, width))


def _positions(batch: int, chunk_size: int):
    check_sizes(chunk_size=chunk_size)
    return jnp.zeros(batch, jnp.int32)
