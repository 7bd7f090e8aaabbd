"""Gates of packed heads and their decays, for the TPU kernels.

A block of gates is [C, R], a column a head: the first heads of the packs, then the
second, and so on (`blocks.gate_columns`). Sums over tokens are products, as Mosaic
has no cumulative sum, and so are rows of columns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.gate_sums import FORGETS_ALL, STEPS, Sums

F32 = jnp.float32


def _exact(ones: Array, x: Array, form: products.Form) -> Array:
    """A product of zeros and ones with gates, which tokens in bfloat16 do not round."""
    dtype = jnp.dtype(jnp.bfloat16)
    return packs.in_parts(lambda part: products.multiply(ones, part, form, dtype), x)


class Totals(NamedTuple):
    """Inclusive sums of g over the chunk.

    Attributes:
        row: along the lanes, [P, 1, CC].
        wide: along the sublanes, in all lanes of a head, [P, C, CC].
        end: at the chunk's last token, [P, 1, 1] of each head.
    """

    row: Sums
    wide: Sums
    end: tuple[Sums, ...]


class Decays(NamedTuple):
    """Decays of a chunk.

    Attributes:
        between: from token j (lanes) to token i, 0 for j > i.
        decay: since the chunk's start.
    """

    between: Float[Array, "P C CC"]
    decay: Float[Array, "P 1 CC"]


def sum_gates(g: Float[Array, "C N"], size: int | None = None) -> Float[Array, "C NN"]:
    """Sums of gates up to each token: the coarse parts of all, then the fine ones.

    With a `size` in each chunk of so many tokens by itself.
    """
    g = jnp.maximum(g, FORGETS_ALL)
    coarse = jnp.floor(g * STEPS) / STEPS
    parts = jnp.concatenate([coarse, g - coarse], axis=1)
    return _exact(_seen(g.shape[0], size), parts, "nn")


def sum_back(d: Float[Array, "C N"]) -> Float[Array, "C N"]:
    """Cotangents of gates from those of their sums: sums from each token on."""
    return _exact(_seen(d.shape[0], None), d, "tn")


def _seen(number: int, size: int | None) -> Float[Array, "C C"]:
    """1 where the other token is of the same chunk, and not later."""
    token = jax.lax.broadcasted_iota(jnp.int32, (number, number), 0)
    other = jax.lax.broadcasted_iota(jnp.int32, (number, number), 1)
    seen = token >= other
    if size is not None:

        def chunk(x):
            return jax.lax.div(x, jnp.int32(size))

        seen &= chunk(token) == chunk(other)
    return seen.astype(F32)


def transpose(columns: Float[Array, "C N"]) -> Float[Array, "N C"]:
    """Columns as rows."""
    number = columns.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, (number, number), 0)
    eye = index == jax.lax.broadcasted_iota(jnp.int32, (number, number), 1)
    return _exact(eye.astype(F32), columns, "nt")


def pack_heads(
    rows: Float[Array, "N C"], start: int, group: int, heads: int
) -> Float[Array, "P 1 CC"]:
    """The rows from `start` on, those of a pack's heads in one."""
    starts = [start + i * group for i in range(heads)]
    parts = [rows[at : at + group] for at in starts]
    return jnp.concatenate(parts, axis=1)[:, None]


def decays(row: Sums, wide: Sums, heads: int) -> Decays:
    """The decays of a chunk's sums along the lanes, and in all lanes of a head."""
    width = row.coarse.shape[-1]
    token = jax.lax.broadcasted_iota(jnp.int32, wide.coarse.shape, 1)
    seen = token >= packs.within(token.shape, width // heads)
    between = (wide.coarse - row.coarse) + (wide.fine - row.fine)
    # Masked before exp, which would overflow above the diagonal.
    between = jnp.exp(jnp.where(seen, between, -1e30))
    return Decays(between, jnp.exp(row.coarse + row.fine))


def until_end(total: Totals) -> Float[Array, "P 1 CC"]:
    """The decay from each token to the chunk's end; at most 1 for those of others."""
    row, end = total.row, Sums(*(x[:, -1:] for x in total.wide))
    between = (end.coarse - row.coarse) + (end.fine - row.fine)
    return jnp.exp(jnp.minimum(between, 0.0))


def decay_at_end(total: Totals, width: int) -> Float[Array, "P 1 DD"]:
    """The decay over the whole chunk, in a memory's lanes."""
    coarse, fine = total.wide
    if width == coarse.shape[-1]:
        return jnp.exp(coarse[:, -1:] + fine[:, -1:])
    return jnp.exp(packs.widen([x.coarse + x.fine for x in total.end], width))
