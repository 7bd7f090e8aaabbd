"""Inputs of Trellis's GPU kernels, and their shared memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.mosaic import ROWS
from memjax_kernels._src.trellis.segment import Tokens

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
    """Static arguments of the kernels.

    Attributes:
        phi: one of `functions.TRELLIS_PHIS`.
        activation: one of `functions.TRELLIS_ACTIVATIONS`.
        stages: chunks of tokens in shared memory at a time, 1 or 2.
        interpret: None, or parameters of the interpreter of GPU kernels.
    """

    phi: str
    activation: str
    stages: int
    interpret: Any


class Inputs(NamedTuple):
    """Inputs of both kernels; a tuple holds one for each pass.

    Attributes:
        q: [B, n, C, H, K].
        inputs: [B, n, C, H, K], [B, n, C, H, V].
        alpha: [B, n, C, H, M].
        gates: [B, n, H, 4, 64] float32: the sum of g up to each token of the chunk
            and gamma, of each pass; after the chunk the last sum, and 0.
        start: memories [B, H, M, D] before the first chunk.
        empty: [B, H, M, D], or None.
        whole: Int32[B], chunks that a batch element fills.
        reset: Int32[B, n], or None; not 0 where a chunk but the first starts from
            `empty`.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any
    start: Any
    empty: Any
    whole: Any
    reset: Any

    @property
    def sizes(self) -> Sizes:
        return _sizes(self.q, self.inputs, self.alpha)


def unsupported(q: Array, k: Array, v: Array, alpha: Array, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    for name, array in {"q": q, "k": k, "v": v, "alpha": alpha}.items():
        if array.dtype != jnp.bfloat16:
            return f"{name} must be bfloat16, got {array.dtype}"
        if array.shape[-1] % 64 or array.shape[-1] > 256:
            letter = {"v": "V", "alpha": "M"}.get(name, "K")
            return f"{letter} must be 64, 128, 192 or 256, got {array.shape[-1]}"
    if chunk_size % 8 or chunk_size > ROWS:
        return f"chunk_size must be a multiple of 8 up to {ROWS}, got {chunk_size}"
    # The number of chunks makes no difference.
    sizes = Sizes(1, chunk_size, alpha.shape[-1], (k.shape[-1], v.shape[-1]))
    needed = forward_bytes(sizes, 1)
    if needed > SHARED_BYTES:
        return (
            f"a program takes {needed / 1024:.0f} KiB of shared memory, more than "
            f"{SHARED_BYTES // 1024}"
        )
    return ""


def has_backward(sizes: Sizes) -> bool:
    """Whether the backward kernel fits: K = V = M = 64 does."""
    return backward_bytes(sizes) <= SHARED_BYTES


def forward_bytes(sizes: Sizes, stages: int) -> int:
    """Shared memory of the forward kernel, bfloat16 tokens."""
    _, _, slots, widths = sizes
    tokens = ROWS * (widths[0] + sum(widths) + slots)
    work = ROWS * (ROWS + 3 * slots + widths[1])
    memories = slots * sum(widths)
    vectors = 4 * ROWS * 4
    # Barriers and reductions take what is added here.
    return 2 * (stages * tokens + work + 3 * memories) + stages * vectors + 6144


def backward_bytes(sizes: Sizes) -> int:
    """Shared memory of the backward kernel, bfloat16 tokens."""
    _, _, slots, widths = sizes
    tokens = ROWS * (widths[0] + sum(widths) + slots + widths[1])
    work = ROWS * (3 * ROWS + 6 * slots)
    memories = slots * sum(widths)
    vectors = 2 * (5 * ROWS + slots) * 4
    reads = 4 * ROWS * slots
    return 2 * (tokens + work + 4 * memories) + reads + vectors + 6144


def prepare(
    tokens: Tokens, memory: tuple[Array, Array], empty: tuple[Array, Array] | None
) -> Inputs:
    """The arguments of a chunk implementation as the kernels take them."""
    reset, number = tokens.reset, tokens.q.shape[1]
    if reset is not None:
        assert empty is not None
        clear = functools.partial(jnp.where, reset[:, 0, None, None, None])
        memory = jax.tree.map(clear, empty, memory)
    whole = jnp.full(tokens.q.shape[0], number, jnp.int32)
    if tokens.full is not None:
        whole = jnp.sum(tokens.full, axis=1, dtype=jnp.int32)
    return Inputs(
        q=tokens.q,
        inputs=(tokens.k, tokens.v),
        alpha=tokens.alpha,
        gates=_gates(tokens),
        start=memory,
        empty=None if reset is None else empty,
        whole=whole,
        reset=None if reset is None else reset.astype(jnp.int32),
    )


def _gates(tokens: Tokens) -> Array:
    def for_both(gate):
        return jnp.broadcast_to(gate, (*gate.shape[:4], 2))

    total = jnp.cumsum(jnp.maximum(for_both(tokens.g), FORGETS_ALL), axis=2)
    tail = [(0, 0)] * total.ndim
    tail[2] = (0, ROWS - total.shape[2])
    # After the chunk the last sum goes on, so that it is also the last of the 64.
    total = jnp.pad(total, tail, mode="edge")
    gates = jnp.stack([total, jnp.pad(for_both(tokens.gamma), tail)], axis=-1)
    # [B, n, 64, H, 2, 2] -> [B, n, H, 4, 64]
    return jnp.moveaxis(gates.reshape(*gates.shape[:4], -1), 2, -1)


def _sizes(q: Any, inputs: tuple[Any, Any], alpha: Any) -> Sizes:
    """Sizes of one program, from the shapes of the tokens."""
    _, n, size, _, _ = q.shape
    return Sizes(n, size, alpha.shape[-1], (inputs[0].shape[-1], inputs[1].shape[-1]))
