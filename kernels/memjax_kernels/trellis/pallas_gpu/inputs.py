"""What the GPU kernels of Trellis take, and how much shared memory they need."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from memjax_kernels.common.mosaic import ROWS
from memjax_kernels.trellis.segment import Tokens
from memjax_kernels.trellis.state import Memories

SHARED_BYTES = 227 * 1024
# Rows of the gradients of gates, for each pass.
TOTAL, LAST, GAMMA = range(3)


class Sizes(NamedTuple):
    """Sizes of one program: n, C, M and the widths K and V of the passes."""

    chunks: int
    size: int
    slots: int
    widths: tuple[int, int]


class Static(NamedTuple):
    """What is fixed when a kernel is compiled.

    Attributes:
        phi: one of `functions.PHIS`.
        activation: one of `functions.ACTIVATIONS`.
        stages: chunks of tokens in shared memory at a time, 1 or 2.
        interpret: None, or parameters of the interpreter of GPU kernels.
    """

    phi: str
    activation: str
    stages: int
    interpret: Any


class Inputs(NamedTuple):
    """What both kernels take; a tuple holds one for each pass.

    Attributes:
        q: [B, n, C, H, K].
        inputs: [B, n, C, H, K], [B, n, C, H, V].
        alpha: [B, n, C, H, M].
        gates: [B, n, H, 4, 64] float32: the sum of g up to each token of the chunk
            and gamma, of each pass; after the chunk the last sum, and 0.
        begin: memories [B, H, M, D] before the first chunk, in which gradients are
            taken; None if they are those to read from.
        running: memories [B, H, M, D] before the first chunk, to read from.
        empty: [B, H, M, D], or None.
        middle: Int32[B], the first chunk that a row does not fill, or n.
        cleared: Int32[B, n], or None; not 0 where a chunk but the first starts from
            `empty`.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any
    begin: Any
    running: Any
    empty: Any
    middle: Any
    cleared: Any

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.q, self.inputs, self.alpha)


def unsupported(tokens: Tokens, memories: Memories) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    arrays = {"q": tokens.q, "k": tokens.k, "v": tokens.v, "alpha": tokens.alpha}
    for name, array in arrays.items():
        if array.dtype != jnp.bfloat16:
            return f"{name} must be bfloat16, got {array.dtype}"
        if array.shape[-1] % 64 or array.shape[-1] > 256:
            letter = {"v": "V", "alpha": "M"}.get(name, "K")
            return f"{letter} must be 64, 128, 192 or 256, got {array.shape[-1]}"
    sizes = sizes_of(tokens.q, (tokens.k, tokens.v), tokens.alpha)
    if sizes.size % 8 or sizes.size > ROWS:
        return f"chunk_size must be a multiple of 8 up to {ROWS}, got {sizes.size}"
    needed = forward_bytes(sizes, 1)
    if needed > SHARED_BYTES:
        return (
            f"a program takes {needed / 1024:.0f} KiB of shared memory, more than "
            f"{SHARED_BYTES // 1024}"
        )
    return ""


def has_backward(sizes: Sizes, aligned: bool) -> bool:
    """Whether the backward kernel fits: K = V = M = 64 does."""
    return backward_bytes(sizes, aligned) <= SHARED_BYTES


def forward_bytes(sizes: Sizes, stages: int) -> int:
    """Shared memory of the forward kernel, bfloat16 tokens."""
    _, _, slots, widths = sizes
    tokens = ROWS * (widths[0] + sum(widths) + slots)
    work = ROWS * (ROWS + 3 * slots + widths[1])
    memories = slots * sum(widths)
    vectors = 4 * ROWS * 4
    # Barriers and reductions take what is added here.
    return 2 * (stages * tokens + work + 3 * memories) + stages * vectors + 6144


def backward_bytes(sizes: Sizes, aligned: bool) -> int:
    """Shared memory of the backward kernel, bfloat16 tokens."""
    _, _, slots, widths = sizes
    tokens = ROWS * (widths[0] + sum(widths) + slots + widths[1])
    work = ROWS * (3 * ROWS + 6 * slots)
    copies = 2 if aligned else 3
    memories = slots * sum(widths)
    vectors = 2 * (5 * ROWS + slots) * 4
    reads = 4 * ROWS * slots
    return 2 * (tokens + work + (copies + 2) * memories) + reads + vectors + 6144


def sizes_of(q: Any, inputs: tuple[Any, Any], alpha: Any) -> Sizes:
    """Sizes of one program, from the shapes of the tokens."""
    _, n, size, _, _ = q.shape
    return Sizes(n, size, alpha.shape[-1], (inputs[0].shape[-1], inputs[1].shape[-1]))
