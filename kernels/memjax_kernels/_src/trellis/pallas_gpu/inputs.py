"""Inputs of Trellis's GPU kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.mosaic import ROWS
from memjax_kernels._src.trellis.segment import as_written
from memjax_kernels._src.trellis.state import Rule

# Rows of the gradients of gates, for each pass.
TOTAL, LAST, GAMMA = range(3)


#: Tiles of the inputs of both passes.
INPUTS = "inputs0", "inputs1"


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


def tokens_of(x: Any) -> dict[str, Any]:
    """Tokens of inputs, or of their gradients, by the names of their tiles."""
    return {"q": x.q, "alpha": x.alpha} | dict(zip(INPUTS, x.inputs, strict=True))


def prepare(x: Chunks, rule: Rule) -> dict[str, Any]:
    """The kernels' inputs that depend on tokens alone."""
    x = as_written(x, rule)
    q, k, v, alpha = x.tokens
    return {"q": q, "inputs": (k, v), "alpha": alpha, "gates": _gates(*x.gates)}


def _gates(gamma: Array, g: Array) -> Array:
    def for_both(gate):
        return jnp.broadcast_to(gate, (*gate.shape[:4], 2))

    total = jnp.cumsum(jnp.maximum(for_both(g), FORGETS_ALL), axis=2)
    tail = [(0, 0)] * total.ndim
    tail[2] = (0, ROWS - total.shape[2])
    # After the chunk the last sum goes on, so that it is also the last of the 64.
    total = jnp.pad(total, tail, mode="edge")
    gates = jnp.stack([total, jnp.pad(for_both(gamma), tail)], axis=-1)
    # [B, n, 64, H, 2, 2] -> [B, n, H, 4, 64]
    return jnp.moveaxis(gates.reshape(*gates.shape[:4], -1), 2, -1)
