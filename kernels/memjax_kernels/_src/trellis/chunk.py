"""The equations of one chunk, as XLA and the TPU kernels compute them.

Arrays have any leading axes, the same for all: [..., C, D] tokens, [..., C] gates,
[..., M, D] memories, [..., 1, 1] flags. `segment` has the equations. They are eqs.
10-12 of "Trellis", except that eq. 12 prints the memory at the chunk's end where the
one at its start is meant.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common.gate_sums import FORGETS_ALL, STEPS, Sums
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.state import Memories

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk; `inputs` are k and v, gates those of the two passes."""

    q: Float[Array, "*B C K"]
    inputs: tuple[Float[Array, "*B C K"], Float[Array, "*B C V"]]
    alpha: Float[Array, "*B C M"]
    gamma: tuple[Float[Array, "*B C"], Float[Array, "*B C"]]
    g: tuple[Float[Array, "*B C"], Float[Array, "*B C"]]


class Options(NamedTuple):
    """Static options of a chunk."""

    phi: str
    activation: str
    multiply: Multiply


def advance(
    chunk: Chunk,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    full: Array,
    reset: Array | None,
    options: Options,
) -> tuple[Memories, Float[Array, "*B C _"]]:
    """Takes the memories through a chunk; flags are float32 0 or 1."""
    start, running = memories
    if reset is not None:
        assert empty is not None
        start = _choose(reset, empty, start)
        running = _choose(reset, empty, running)
    reads, keys = _compress(0, chunk.q, chunk, start[0], running[0], options)
    query = functions.apply(options.activation, reads)
    y, values = _compress(1, query, chunk, start[1], running[1], options)
    running = keys, values
    return Memories(_choose(full, running, start), running), y


def _compress(index, q, chunk, start, running, options):
    """Pass 0 or 1: its reads and the memory after the chunk."""
    dot, x, gamma = options.multiply, chunk.inputs[index], chunk.gamma[index]
    target = chunk.alpha.astype(F32)
    # Sums of gates stay finite for differences: see `FORGETS_ALL`.
    total = _cumulative(chunk.g[index])  # [..., C]
    last = Sums(*(part[..., -1:] for part in total))
    decay = jnp.exp(total.coarse + total.fine)[..., None]
    u = functions.error_gradient(options.phi, dot(x, start, "nt"), target)
    u = u * gamma[..., None]
    if index == 0:
        # The first pass reads rows of its memory, y1 = M q, the second columns, y = Mᵀ
        # f.
        scores, written, past = dot(q, x, "nt"), u, dot(q, running, "nt")
    else:
        scores, written, past = dot(q, u, "nt"), x, dot(q, running, "nn")
    y = decay * past - dot(scores * _decay(total), written, "nn")
    decayed = u * jnp.exp(_minus(last, total))[..., None]
    return y, jnp.exp(last.coarse + last.fine)[..., None] * running - dot(
        decayed, x, "tn"
    )


def _mask(size):
    rows = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return rows >= jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)


def _cumulative(g):
    """Inclusive sums over tokens."""
    g = jnp.maximum(g, FORGETS_ALL)
    coarse = jnp.floor(g * STEPS) / STEPS
    return Sums(_sums(coarse), _sums(g - coarse))


def _minus(a, b):
    """a - b, where the large parts cancel without a rounding."""
    return (a.coarse - b.coarse) + (a.fine - b.fine)


def _sums(g):
    """As a product: Mosaic has no cumulative sum."""
    seen = _mask(g.shape[-1]).astype(F32)
    return jax.lax.dot_general(
        g,
        seen,
        (((g.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )


def _decay(total):
    """exp(total_i - total_j) for i >= j, else 0: masked before exp."""
    rows = Sums(*(part[..., :, None] for part in total))
    difference = _minus(rows, Sums(*(part[..., None, :] for part in total)))
    seen = jnp.broadcast_to(_mask(difference.shape[-1]), difference.shape)
    return jnp.exp(jnp.where(seen, difference, -1e30))


def _choose(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the flag [..., 1, 1] is 1."""
    # Flags are float32, as the TPU kernels get them in one array with the gates.
    return jax.tree.map(
        lambda a, b: jnp.where(jnp.broadcast_to(flag, a.shape) > 0.5, a, b), new, old
    )
