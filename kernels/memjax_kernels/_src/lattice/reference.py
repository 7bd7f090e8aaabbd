"""Lattice one token at a time, in plain JAX: the definition.

Memory M [M, V], a slot s_i a row; phi(s) = s / |s|. With every gradient taken at the
memory M' of the chunk's start, r_i = |s'_i| (1 where the recurrence is normalised):

    variant   objective                    h                c
    "dec"     |phi(M)^T k - v|^2           phi(M')^T k - v  k
    "enc"     |phi(M) v - k|^2             v                phi(M') v - k
    "sim"     -<phi(M) v, k>               -v               k

    s_i <- mu s_i - (gamma c_i / r_i) (h - phi(s'_i) <phi(s'_i), h>)     (eqs. 13, 16)
    s_i <- sign(s_i) max(|s_i| + g, 0)                   forget="l1"     (eq. 18)
    read y = M^T q, of slots divided by their norm where normalised      (eq. 14)

mu = exp(g) with forget="l2", else 1; the loss's factor 2 is part of gamma. At the end
of a chunk of C tokens M' becomes M, normalised. C = 1 is the recurrence of the paper;
with C > 1 the division by the norm inside a chunk, which does not change later
gradients, is put off to the read. A state has M' and the tokens since, from which M
follows: with A the sum of their w h^T, w = gamma c / r, decayed by mu,

    M = decay M' + cwp phi(M') - A      cwp_i = <phi(s'_i), a_i>

Karami, Mirrokni, Lattice (2025), https://arxiv.org/abs/2504.05646, section 3.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.common.steps import open_chunk, segment
from memjax_kernels._src.lattice import checks, chunk
from memjax_kernels._src.lattice.memory import (
    LatticeForget,
    LatticeState,
    LatticeTokens,
    LatticeVariant,
    Rule,
)


def lattice_step(
    q: Float[Array, "B H M"],
    k: Float[Array, "B H M"],
    v: Float[Array, "B H V"],
    gamma: Float[Array, "B H"],
    g: Float[Array, "B H"] | None,
    state: LatticeState,
    *,
    variant: LatticeVariant = "dec",
    normalize: bool = True,
    forget: LatticeForget | None = None,
) -> tuple[LatticeState, Float[Array, "B H V"]]:
    """One token: writes, then reads. Arguments and errors as in `lattice`."""
    rule = Rule(variant, normalize, forget)
    size = getattr(state, "chunk_size", 1)
    checks.check_options(rule, size, g)
    sizes = checks.check_tokens(q, k, v, gamma, g, "B H")
    segment.check_state("state", state, checks.like(sizes, size))
    checks.check_norms("state", state, rule)
    return step(q, k, v, gamma, g, state, rule)


def step(
    q: Array,
    k: Array,
    v: Array,
    gamma: Array,
    g: Array | None,
    state: LatticeState,
    rule: Rule,
) -> tuple[LatticeState, Array]:
    """`lattice_step` without checks."""
    token = LatticeTokens(k, v, gamma, jnp.zeros_like(gamma) if g is None else g)
    after, y = open_chunk.step(
        functools.partial(read, rule),
        functools.partial(write, rule),
        q,
        token,
        (state.start, state.tokens, state.position),
    )
    return LatticeState(*after, state.chunk_size), y.astype(v.dtype)


def read(
    rule: Rule,
    multiply: Multiply,
    q: Float[Array, "*B M"],
    tokens: LatticeTokens,
    start: Float[Array, "*B M V"],
) -> Float[Array, "*B V"]:
    """The read of one query after all tokens of a chunk."""
    given = _chunk(rule, q[..., None, :], tokens)
    if tokens.gamma.shape[-1] == 1:
        return chunk.token(given, start, rule)[1][..., 0, :]
    return chunk.read_last(given, start, rule, multiply)[..., 0, :]


def write(
    rule: Rule,
    multiply: Multiply,
    tokens: LatticeTokens,
    start: Float[Array, "*B M V"],
) -> Float[Array, "*B M V"]:
    """The memory after a chunk."""
    given = _chunk(rule, tokens.k, tokens)
    if tokens.gamma.shape[-1] == 1:
        return chunk.token(given, start, rule)[0]
    return chunk.write_all(given, start, rule, multiply)


def _chunk(rule, q, tokens):
    k, v, gamma, g = tokens
    g = None if rule.forget is None else g[..., None]
    return chunk.Tokens(q, k, v, gamma[..., None], g)
