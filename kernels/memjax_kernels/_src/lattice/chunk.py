"""The equations of one chunk, as XLA and the TPU kernels compute them.

With the gradients of a chunk taken at its start M', token t's memory before the
division by its norm is b_t M' + cwp_t phi(M') - A_t, A_t = mu_t A_{t-1} + w_t h_t^T.
The second and third term are across the slots of M', so their norms follow from
H, P = H phi(M')^T and the Gram matrix G = H H^T without A_t:

    cwp_t = sum_{i<=t} D_ti w_i p_i
    n2_t = sum_{i<=t} D_ti^2 (2 w_i (stril(D G) W)_i + w_i^2 |h_i|^2) - cwp_t^2
    rho_t = (b_t^2 + n2_t)^{-1/2}
    Y = (Q rho b) M' + (Q rho cwp) phi(M') - (D (Q rho) W^T) H

D_ti = mu_{i+1} ... mu_t, all ones without forgetting, and b_t = mu_1 ... mu_t. Not
normalised, rho = 1. All products of matrices; a chunk of one token is the exact
recurrence and has its own, shorter `token`.

Arrays have any leading axes, the same for all: tokens [..., C, D], rates [..., C, 1],
memories [..., M, V].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.products import Multiply, multiplier
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.lattice.memory import LatticeVariant, Rule
from memjax_kernels._src.lattice.sphere import (
    directions,
    inverse_norm,
    l2_normalize,
    shrink,
)

F32 = jnp.float32


class Tokens(NamedTuple):
    """Tokens of one chunk, or one token where C = 1.

    Attributes:
        q: [..., C, M].
        k: [..., C, M].
        v: [..., C, V].
        gamma: [..., C, 1].
        g: [..., C, 1], or None without forgetting.
    """

    q: Float[Array, "*B C M"]
    k: Float[Array, "*B C M"]
    v: Float[Array, "*B C V"]
    gamma: Float[Array, "*B C 1"]
    g: Float[Array, "*B C 1"] | None


class _Writes(NamedTuple):
    """h, w and p of every token."""

    h: Float[Array, "*B C V"]
    write: Float[Array, "*B C M"]
    along: Float[Array, "*B C M"]


def _writes(tokens, direction, inverse, rule, multiply) -> _Writes:
    h, c, along = _residuals(direction, tokens.k, tokens.v, rule.variant, multiply)
    write = tokens.gamma * c
    if not rule.normalize:
        write = write * jnp.swapaxes(inverse, -1, -2)
    return _Writes(h, write, along)


def _added(h, write, between, multiply):
    """The terms of n2 without the gates behind them."""
    # The Gram matrix gives the norms without forming A after every token.
    before = multiply(_below(between) * multiply(h, h, "nt"), write, "nn")
    squares = jnp.sum(h * h, axis=-1, keepdims=True)
    return 2 * write * before + write * write * squares


def advance(
    tokens: Tokens,
    start: Float[Array, "*B M V"],
    rule: Rule,
    multiply: Multiply,
) -> tuple[Float[Array, "*B M V"], Float[Array, "*B C V"]]:
    """Takes a memory through a chunk; forget="l1" is taken in `token` only."""
    tokens = jax.tree.map(lambda x: x.astype(F32), tokens)
    q, (between, inside) = tokens.q, _decays(tokens.g, tokens.gamma)
    direction, inverse = directions(start, rule)
    h, write, along = _writes(tokens, direction, inverse, rule, multiply)
    added = _added(h, write, between, multiply)
    # Terms of a difference: not in the dtype of the tokens.
    cumulative = multiplier(jnp.dtype(F32))
    taken = cumulative(between, write * along, "nn")
    size = cumulative(between * between, added, "nn")

    q, y = _from_start(q, start, direction, (inside, taken, size), rule, multiply)
    y -= multiply(between * multiply(q, write, "nt"), h, "nn")

    if tokens.g is not None:
        write = write * jnp.swapaxes(between[..., -1:, :], -1, -2)
    after = _memory(start, direction, multiply(write, h, "tn"), inside[..., -1:, :])
    return l2_normalize(after) if rule.normalize else after, y


def read_last(
    tokens: Tokens,
    start: Float[Array, "*B M V"],
    rule: Rule,
    multiply: Multiply,
) -> Float[Array, "*B 1 V"]:
    """The read of `advance` by one query [..., 1, M], after all tokens."""
    q, (between, _) = tokens.q, _decays(tokens.g, tokens.gamma)
    direction, inverse = directions(start, rule)
    h, write, along = _writes(tokens, direction, inverse, rule, multiply)
    until, decay = _until(tokens)

    def total(x):
        return jnp.sum(x, axis=-2, keepdims=True)

    taken = total(until * write * along)
    size = total(until * until * _added(h, write, between, multiply))
    q, y = _from_start(q, start, direction, (decay, taken, size), rule, multiply)
    return y - total(jnp.sum(q * until * write, axis=-1, keepdims=True) * h)


def _from_start(q, start, direction, changes, rule, multiply):
    """Queries as writes meet them, and their reads of the slots at the chunk's start.

    `changes` of each slot: its decay, what it loses along itself, and the square of
    what it gains.
    """
    decay, taken, size = changes
    if not rule.normalize:
        past = multiply(q * decay, start, "nn")
        return q, past + multiply(q * taken, direction, "nn")
    # Queries are divided by the slots' norms instead of the slots: C x M numbers, not C
    # memories.
    q = q * inverse_norm(decay, size - taken * taken)
    return q, multiply(q * (decay + taken), start, "nn")


def write_all(
    tokens: Tokens,
    start: Float[Array, "*B M V"],
    rule: Rule,
    multiply: Multiply,
) -> Float[Array, "*B M V"]:
    """The memory of `advance`, without its reads."""
    direction, inverse = directions(start, rule)
    h, write, _ = _writes(tokens, direction, inverse, rule, multiply)
    until, decay = _until(tokens)
    after = _memory(start, direction, multiply(until * write, h, "tn"), decay)
    return l2_normalize(after) if rule.normalize else after


def _until(tokens):
    """The decay from each token to the chunk's end, and that of the memory."""
    gamma, g = tokens.gamma[..., 0], tokens.g
    return open_chunk.decays(jnp.zeros_like(gamma) if g is None else g[..., 0])


_exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _combine(column: Float[Array, "*B M 1"], slots: Float[Array, "*B M V"]) -> Array:
    """The weighted sum of slots, [..., 1, V]."""
    return _exact("...m,...mv->...v", column[..., 0], slots)[..., None, :]


def _overlap(slots: Float[Array, "*B M V"], row: Float[Array, "*B 1 V"]) -> Array:
    """The inner products of slots and a row, [..., M, 1]."""
    return _exact("...mv,...v->...m", slots, row[..., 0, :])[..., None]


def token(
    tokens: Tokens, start: Float[Array, "*B M V"], rule: Rule
) -> tuple[Float[Array, "*B M V"], Float[Array, "*B 1 V"]]:
    """Takes a memory through a chunk of one token: equations 13 and 14, 16 or 18."""
    q, k, v, gamma, g = jax.tree.map(lambda x: x.astype(F32), tokens)
    q, k = jnp.swapaxes(q, -1, -2), jnp.swapaxes(k, -1, -2)
    direction, inverse = directions(start, rule)
    match rule.variant:
        case "dec":
            h, c = _combine(k, direction) - v, k
        case "enc":
            h, c = v, _overlap(direction, v) - k
        case "sim":
            h, c = -v, k
    write = gamma * c * inverse
    along = _overlap(direction, h)
    decay_factor = jnp.exp(g) if rule.forget == "l2" else jnp.ones_like(gamma)
    orthogonal = (write * along) * direction - write * h
    memory = decay_factor * start + orthogonal
    if rule.forget == "l1":
        memory = shrink(memory, g)
    after = l2_normalize(memory) if rule.normalize else memory
    # The norm below is known only where a write is across the slot and nothing shrinks
    # it.
    if not rule.normalize or rule.forget == "l1":
        return after, _combine(q, after)
    # Squared norm of the part across the slot.
    if rule.forget == "l2":
        # It may be all that is left, and a difference of squares loses its digits.
        size = jnp.sum(orthogonal * orthogonal, axis=-1, keepdims=True)
    else:
        squares = jnp.sum(h * h, axis=-1, keepdims=True)
        size = write * write * (squares - along * along)
    return after, _combine(q * inverse_norm(decay_factor, size), memory)


def _memory(start, direction, written, decay):
    """M before the division by its norms, from M' and A."""
    along = jnp.sum(direction * written, axis=-1, keepdims=True)
    return decay * start + along * direction - written


def _residuals(direction, k, v, variant: LatticeVariant, multiply: Multiply):
    """h, c and <phi(s), h>: the gradient at slot i is c_i (h - phi(s_i) <., h>)."""
    if variant == "dec":
        h = multiply(k, direction, "nn") - v
        return h, k, multiply(h, direction, "nt")
    along = multiply(v, direction, "nt")
    return (v, along - k, along) if variant == "enc" else (-v, k, -along)


def _decays(g, gamma):
    """D [..., C, C], and products of gates from the chunk's start [..., C, 1]."""
    if g is not None:
        g = g.astype(F32)[..., 0]
        return chunks.decay(g), jnp.exp(jnp.cumsum(g, axis=-1))[..., None]
    size = gamma.shape[-2]
    shape = (*gamma.shape[:-1], size)
    at = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    seen = at(len(shape) - 2) >= at(len(shape) - 1)
    return seen.astype(F32), jnp.ones_like(gamma)


def _below(square):
    """The part below the diagonal."""
    at = functools.partial(jax.lax.broadcasted_iota, jnp.int32, square.shape)
    return jnp.where(at(square.ndim - 2) > at(square.ndim - 1), square, 0.0)
