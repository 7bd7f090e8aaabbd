"""The equations of one chunk, as XLA and the TPU kernels compute them.

Arrays have any leading axes, the same for all: [..., C, D] tokens, [..., C] gates,
[..., M, D] memories. `segment` has the equations. They are eqs.
10-12 of "Trellis", except that eq. 12 prints the memory at the chunk's end where the
one at its start is meant.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.cpu import exact_product
from memjax_kernels._src.common.gate_sums import FORGETS_ALL, STEPS, Sums
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.state import TrellisTokens

F32 = jnp.float32


class Options(NamedTuple):
    """The options of `Rule`, and the product; both flags are read by packed heads."""

    phi: str
    activation: str
    bound_steps: bool
    normalize: bool
    multiply: Multiply


def advance(
    q: Float[Array, "*B C K"],
    x: TrellisTokens,
    memory: tuple[Float[Array, "*B M K"], Float[Array, "*B M V"]],
    options: Options,
) -> tuple[tuple[Array, Array], Float[Array, "*B C V"]]:
    """Takes the memories through a chunk."""
    keys, values = memory
    gates = x.key_gamma, x.key_g, x.alpha
    reads, keys = _compress(0, q, x.k, *gates, keys, options)
    query = functions.apply(options.activation, reads)
    gates = x.value_gamma, x.value_g, x.alpha
    y, values = _compress(1, query, x.v, *gates, values, options)
    return (keys, values), y


def _compress(index, q, x, gamma, g, alpha, memory, options):
    """Pass 0 or 1: its reads and the memory after the chunk."""
    dot, target = options.multiply, alpha.astype(F32)
    # Sums of gates stay finite for differences: see `FORGETS_ALL`.
    total = _cumulative(g)  # [..., C]
    last = Sums(*(part[..., -1:] for part in total))
    decay = jnp.exp(total.coarse + total.fine)[..., None]
    u = functions.error_gradient(options.phi, dot(x, memory, "nt"), target)
    u = u * gamma[..., None]
    if index == 0:
        # The first pass reads rows of its memory, y1 = M q, the second columns, y = Mᵀ
        # f.
        scores, written, past = dot(q, x, "nt"), u, dot(q, memory, "nt")
    else:
        scores, written, past = dot(q, u, "nt"), x, dot(q, memory, "nn")
    y = decay * past - dot(scores * _decay(total), written, "nn")
    decayed = u * jnp.exp(_minus(last, total))[..., None]
    left = jnp.exp(last.coarse + last.fine)[..., None] * memory
    return y, left - dot(decayed, x, "tn")


def read(
    q: Float[Array, "*B K"],
    x: TrellisTokens,
    memory: tuple[Float[Array, "*B M K"], Float[Array, "*B M V"]],
    options: Options,
) -> Float[Array, "*B V"]:
    """The read of one query after all tokens of a chunk."""
    dot, (keys, values) = options.multiply, memory
    q = q[..., None, :]
    u, left = _errors(x.k, x.key_gamma, x.key_g, x.alpha, keys, options)
    overlap = jnp.sum(x.k * q, axis=-1, keepdims=True)
    reads = left * dot(q, keys, "nt") - _total(overlap * u)
    query = functions.apply(options.activation, reads)
    u, left = _errors(x.v, x.value_gamma, x.value_g, x.alpha, values, options)
    overlap = jnp.sum(u * query, axis=-1, keepdims=True)
    return (left * dot(query, values, "nn") - _total(overlap * x.v))[..., 0, :]


def write(
    x: TrellisTokens,
    memory: tuple[Float[Array, "*B M K"], Float[Array, "*B M V"]],
    options: Options,
) -> tuple[Float[Array, "*B M K"], Float[Array, "*B M V"]]:
    """The memories after a chunk."""

    def after(x, gamma, g, alpha, memory):
        u, left = _errors(x, gamma, g, alpha, memory, options)
        return left * memory - options.multiply(u, x, "tn")

    keys, values = memory
    return (
        after(x.k, x.key_gamma, x.key_g, x.alpha, keys),
        after(x.v, x.value_gamma, x.value_g, x.alpha, values),
    )


def _errors(x, gamma, g, alpha, memory, options):
    """u of a pass, decayed to the chunk's end, and the decay over all of it."""
    z = options.multiply(x, memory, "nt")
    until, left = open_chunk.decays(g)
    return functions.error_gradient(options.phi, z, alpha) * gamma[
        ..., None
    ] * until, left


def _total(x):
    return jnp.sum(x, axis=-2, keepdims=True)


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
    return exact_product(g, _mask(g.shape[-1]).T.astype(F32))


def _decay(total):
    """exp(total_i - total_j) for i >= j, else 0: masked before exp."""
    rows = Sums(*(part[..., :, None] for part in total))
    difference = _minus(rows, Sums(*(part[..., None, :] for part in total)))
    return jnp.exp(jnp.where(_mask(difference.shape[-1]), difference, -1e30))
