"""Inputs of Lattice's GPU kernels."""

from typing import Any, NamedTuple

from memjax_kernels._src.lattice.memory import Rule

# Tokens in shared memory at a time; the backward kernel holds as many memories, and
# one for each group of a block.
GROUP = 8
GROUPS = 4
BLOCK = GROUPS * GROUP
# The fewest float32 of a copy.
GATES = 32


class Static(NamedTuple):
    """Static arguments of the kernels."""

    rule: Rule
    interpret: Any


class ChunkInputs(NamedTuple):
    """Inputs of the kernels of chunks.

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


class TokenInputs(NamedTuple):
    """Inputs of the kernels of single tokens, float32 but for `reset`.

    There are n groups, which make whole blocks.

    Attributes:
        q: [B, n, GROUP, H, M].
        k: [B, n, GROUP, H, M].
        v: [B, n, GROUP, H, V].
        gamma: [B, n, H, GATES], 0 after the group.
        start: [B, H, M, V], the memory before the first token.
        empty: likewise, or None.
        reset: Int32[B, n, GROUP], or None; not 0 where a token starts from `empty`.
    """

    q: Any
    k: Any
    v: Any
    gamma: Any
    start: Any
    empty: Any
    reset: Any


class Gradients(NamedTuple):
    """Outputs of both backward kernels, like the inputs.

    gamma is [B, n, H, 64] of chunks, and by slot [B, n, GROUP, H, M] of tokens.
    """

    q: Any
    k: Any
    v: Any
    gamma: Any
    start: Any
    empty: Any
