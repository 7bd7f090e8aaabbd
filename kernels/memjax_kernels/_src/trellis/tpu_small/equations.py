"""A chunk of at most 8 tokens of packs of heads, and its gradient.

`packed` has the same equations with tokens along the lanes, where so few would leave
most of a register empty. Here they are along the sublanes, the first head's C, then the
second's, and so on: R rows. The memory is the operand that a matrix unit holds, and
the few rows of tokens stream through it. With a memory S:

    first pass    Z = K S^T,  U = gamma E(Z, t),  A = (Q K^T) * W
                  Y1 = decay * Q S^T - A U,  S' = end * S - (until * U)^T K
    second pass   the same for Z, U and S' with V;  F = activation(Y1)
                  A = (F U^T) * W,  Y = (decay * F) S - A V

where Q, K and V have each head's tokens in its own lanes (`packs.block_diagonal`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.chunk import Options

F32 = jnp.float32


class Decays(NamedTuple):
    """Decays of a pass; a token's number is in all lanes.

    Attributes:
        decay: since the chunk's start, [P, R, M].
        until: from each token to the chunk's end, [P, R, M]; None for single tokens.
        between: from token j (lanes) to token i of the same head, else 0, [P, R, R];
            None for single tokens.
    """

    decay: Any
    until: Any
    between: Any


class Part(NamedTuple):
    """A chunk's tokens, and the gates of both passes or one for both.

    Attributes:
        q: [P, R, KK].
        k: [P, R, KK].
        v: [P, R, VV].
        target: [P, R, M].
        gammas: step sizes, each [P, R, M].
        decays: what gates leave.
    """

    q: Any
    k: Any
    v: Any
    target: Any
    gammas: tuple[Any, ...]
    decays: tuple[Decays, ...]


class Write(NamedTuple):
    """Residuals of a pass, and the vjp of `error`."""

    u: Float[Array, "P R M"]
    error: Float[Array, "P R M"]
    back: Any


class Cotangents(NamedTuple):
    """Of a memory: `decayed`, and the sum over rows of left^T right."""

    left: Float[Array, "P R M"]
    right: Float[Array, "P R DD"]
    decayed: Float[Array, "P M DD"]


class Pulled(NamedTuple):
    """Cotangents of everything that `advance` takes.

    Those of gamma and of a gate's sum are columns, for each pass.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    alpha: Float[Array, "P C MM"]
    numbers: tuple[Float[Array, "P R 1"], ...]
    keys: Cotangents
    values: Cotangents


class Rules(NamedTuple):
    """How a chunk is computed.

    Attributes:
        options: what is fixed when the code is compiled.
        heads: of a pack.
        size: tokens of a chunk. Scores of single tokens are a column, [P, R, 1].
    """

    options: Options
    heads: int
    size: int

    def dot(self, x: Array, y: Array, form: products.Form) -> Array:
        """A product of matrices."""
        return self.options.multiply(x, y, form)

    def read(
        self, memory: Array, x: Array, y: Array, form: products.Form
    ) -> tuple[Array, Array]:
        """Products of x and y with the memory, as one."""
        both = self.dot(jnp.concatenate([x, y], axis=1), memory, form)
        return both[:, : x.shape[1]], both[:, x.shape[1] :]

    def until(self, decays: Decays, x: Array) -> Array:
        """x decayed to the chunk's end."""
        return x if self.size == 1 else x * decays.until

    def scores(self, x: Array, y: Array, between: Any) -> Array:
        """Decayed products of a token with those that it sees."""
        if self.size == 1:
            return _sum(x * y)
        return self.dot(x, y, "nt") * between

    def times(self, scores: Array, x: Array) -> Array:
        """Sums over the tokens that a token sees."""
        return scores * x if self.size == 1 else self.dot(scores, x, "nn")

    def seen(self, scores: Array, x: Array) -> Array:
        """Sums over the tokens that see a token."""
        return scores * x if self.size == 1 else self.dot(scores, x, "tn")


def write(index: int, x: Part, z: Array, rules: Rules) -> Write:
    """The errors of a pass, 0 or 1, of its chunk-start memory's predictions."""

    def error(z, target):
        return functions.error_gradient(
            rules.options.phi, z, target, sigmoid=packs.sigmoid
        )

    e, back = jax.vjp(error, z, x.target)
    return Write(x.gammas[min(index, len(x.gammas) - 1)] * e, e, back)


def written(
    index: int, x: Part, u: Array, memory: Array, rules: Rules
) -> Float[Array, "P M DD"]:
    """The memory of a pass after the chunk."""
    decays = x.decays[min(index, len(x.decays) - 1)]
    left = _end(decays, memory, rules) * memory
    return left - rules.dot(rules.until(decays, u), (x.k, x.v)[index], "tn")


def rewrite(x: Part, keys: Array, values: Array, rules: Rules):
    """The memories after a chunk, without its reads."""
    after = []
    for index, (tokens, memory) in enumerate(((x.k, keys), (x.v, values))):
        z = rules.dot(tokens, memory, "nt")
        u = write(index, x, z, rules).u
        after.append(written(index, x, u, memory, rules))
    return tuple(after)


def advance(
    x: Part, keys: Array, values: Array, rules: Rules
) -> tuple[tuple[Array, Array], Float[Array, "P C VV"]]:
    """The memories after a chunk, and its reads."""
    first, second = x.decays[0], x.decays[-1]
    z, past = rules.read(keys, x.k, x.q, "nt")
    u = write(0, x, z, rules).u
    scores = rules.scores(x.q, x.k, first.between)
    reads = first.decay * past - rules.times(scores, u)
    after_keys = written(0, x, u, keys, rules)

    f = activate(reads, rules)
    u = write(1, x, rules.dot(x.v, values, "nt"), rules).u
    scores = rules.scores(f, u, second.between)
    y = rules.dot(second.decay * f, values, "nn") - rules.times(scores, x.v)
    after_values = written(1, x, u, values, rules)
    return (after_keys, after_values), diagonal_blocks(y, rules.heads)


def activate(reads: Array, rules: Rules) -> Array:
    """f of the first pass's reads."""
    return functions.apply(rules.options.activation, reads, sigmoid=packs.sigmoid)


def vjp(
    x: Part,
    keys: Float[Array, "P M KK"],
    values: Float[Array, "P M VV"],
    d_after: tuple[Array, Array],
    d_y: Float[Array, "P C VV"],
    rules: Rules,
) -> Pulled:
    """The cotangents of a chunk, which is computed again from its memories."""
    left, heads = (x.decays[0], x.decays[-1]), rules.heads
    blocks = functools.partial(diagonal_blocks, heads=heads)
    d_keys, d_values = d_after
    # The first pass again.
    z, past = rules.read(keys, x.k, x.q, "nt")
    first = write(0, x, z, rules)
    scores = rules.scores(x.q, x.k, left[0].between)
    reads = left[0].decay * past - rules.times(scores, first.u)
    f, back = jax.vjp(lambda reads: activate(reads, rules), reads)

    # The second, with its cotangents.
    dd_y = block_diagonal(d_y, heads)
    z, d_past = rules.read(values, x.v, dd_y, "nt")
    second = write(1, x, z, rules)
    written = rules.scores(f, second.u, left[1].between)
    d_scores = -rules.scores(dd_y, x.v, left[1].between)
    d_f = left[1].decay * d_past + rules.times(d_scores, second.u)
    d_state = -rules.until(left[1], rules.dot(x.v, d_values, "nt"))
    d_u = rules.seen(d_scores, f) + d_state
    d_z, d_target = second.back(x.gammas[-1] * d_u)
    d_v = rules.dot(d_z, values, "nn") - rules.seen(written, dd_y)
    d_v -= rules.dot(rules.until(left[1], second.u), d_values, "nn")
    decayed = _end(left[1], d_values, rules) * d_values
    of_values = _both((d_z, left[1].decay * f), (x.v, dd_y), decayed)
    gamma_2 = _sum(second.error * d_u)
    total_2 = _sum(f * d_f) - x.gammas[-1][..., :1] * gamma_2
    total_2 += _at_end(_sum(second.u * d_state), decayed * values, heads)

    # The first pass.
    (d_reads,) = back(d_f)
    d_state = -rules.until(left[0], rules.dot(x.k, d_keys, "nt"))
    d_u = d_state - rules.seen(scores, d_reads)
    d_scores = -rules.scores(d_reads, first.u, left[0].between)
    d_z, d_target_1 = first.back(x.gammas[0] * d_u)
    d_past = left[0].decay * d_reads
    d_k, d_q = rules.read(keys, d_z, d_past, "nn")
    d_k += rules.seen(d_scores, x.q)
    d_k -= rules.dot(rules.until(left[0], first.u), d_keys, "nn")
    d_q += rules.times(d_scores, x.k)
    decayed = _end(left[0], d_keys, rules) * d_keys
    of_keys = _both((d_z, d_past), (x.k, x.q), decayed)
    gamma_1 = _sum(first.error * d_u)
    total_1 = _sum(d_reads * reads) - x.gammas[0][..., :1] * gamma_1
    total_1 += _at_end(_sum(first.u * d_state), decayed * keys, heads)
    d_target = jnp.split(d_target + d_target_1, heads, axis=1)
    return Pulled(
        blocks(d_q),
        blocks(d_k),
        blocks(d_v),
        jnp.concatenate(d_target, axis=-1),
        (gamma_1, gamma_2, total_1, total_2),
        of_keys,
        of_values,
    )


def _both(left, right, decayed) -> Cotangents:
    """Of two sums of products, as one product."""
    left, right = (jnp.concatenate(x, axis=1) for x in (left, right))
    return Cotangents(left, right, decayed)


def _end(decays: Decays, memory: Array, rules: Rules) -> Float[Array, "P 1 DD"]:
    """The decay over the whole chunk, in a memory's lanes."""
    last = [(i + 1) * rules.size - 1 for i in range(rules.heads)]
    numbers = [decays.decay[:, at : at + 1, :1] for at in last]
    return packs.widen(numbers, memory.shape[-1])


def _sum(x: Float[Array, "P R M"]) -> Float[Array, "P R 1"]:
    return jnp.sum(x, axis=-1, keepdims=True)


def _at_end(tokens: Array, memory: Array, heads: int) -> Float[Array, "P R 1"]:
    """Sums of both over each head, at the head's last token."""
    size = tokens.shape[1] // heads
    row = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    total = jnp.zeros_like(tokens)
    for i, of_memory in enumerate(packs.sums(packs.sum_slots(memory), heads)):
        here = (row >= i * size) & (row < (i + 1) * size)
        of_head = jnp.where(here, tokens, 0.0).sum(1, keepdims=True) + of_memory
        total = jnp.where(row == (i + 1) * size - 1, of_head, total)
    return total
