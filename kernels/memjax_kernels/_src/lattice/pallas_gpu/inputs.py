"""Inputs of Lattice's GPU kernels."""

from typing import Any, NamedTuple


class ChunkInputs(NamedTuple):
    """Inputs of the kernels.

    Attributes:
        q: [B, n, C, H, M].
        k: [B, n, C, H, M].
        v: [B, n, C, H, V].
        gamma: [B, n, H, 64] float32, 0 after the chunk.
        start: [B, H, M, V] float32, the memory before the first chunk.
        empty: likewise, or None.
        whole: Int32[B], chunks that a batch element fills.
        reset: Int32[B, n], or None; not 0 where a chunk but the first starts from
            `empty`.
    """

    q: Any
    k: Any
    v: Any
    gamma: Any
    start: Any
    empty: Any
    whole: Any
    reset: Any
