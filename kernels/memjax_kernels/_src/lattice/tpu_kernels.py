"""The kernels of Lattice on a TPU: one block of tokens of a few heads.

`before` and `after` are [., M, V] blocks that all blocks of tokens of a head share.
`after` holds the memory between them, as `d_start` holds its cotangent.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.lattice import chunk
from memjax_kernels._src.lattice.memory import Rule

F32 = jnp.float32


class Inputs(NamedTuple):
    """Tokens as the kernels take them: G = B H heads, n blocks of C tokens.

    Attributes:
        q: [G, n, C, M].
        k: [G, n, C, M].
        v: [G, n, C, V].
        gates: float32, gamma and flags: [G, n, R, C] of a chunk: gamma, full, and
            reset if resets were given; [G, n, C, R] of single tokens: gamma, and
            reset if resets were given.
    """

    q: Any
    k: Any
    v: Any
    gates: Any


def chunk_forward(
    x: Inputs, before, empty, after, y, residuals, *, rule: Rule, multiply: Multiply
):
    """One chunk; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        after[...] = before[...]

    start = after[...]
    if residuals is not None:
        residuals[...] = start.astype(residuals.dtype)
    tokens, flags = _read_chunk(x)
    after[...], read = _through_chunk(tokens, start, empty[...], flags, rule, multiply)
    y[...] = read.astype(y.dtype)


def chunk_backward(
    x: Inputs,
    empty,
    residuals,
    d_after,
    d_y,
    d_x: Inputs,
    d_start,
    d_empty,
    *,
    rule: Rule,
    multiply: Multiply,
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        d_start[...] = d_after[...]
        d_empty[...] = jnp.zeros(d_empty.shape, F32)

    tokens, flags = _read_chunk(x)

    def through(tokens, start, empty):
        return _through_chunk(tokens, start, empty, flags, rule, multiply)

    pull = jax.vjp(through, tokens, residuals[...].astype(F32), empty[...])[1]
    d_tokens, d_start[...], d_fresh = pull((d_start[...], d_y[...].astype(F32)))
    d_empty[...] += d_fresh
    d_x.q[...] = d_tokens.q.astype(d_x.q.dtype)
    d_x.k[...] = d_tokens.k.astype(d_x.k.dtype)
    d_x.v[...] = d_tokens.v.astype(d_x.v.dtype)
    # Flags have no gradient.
    d_x.gates[...] = jnp.zeros(d_x.gates.shape, F32)
    d_x.gates[:, 0, :] = d_tokens.gamma[..., 0]


def token_forward(x: Inputs, before, empty, after, y, residuals, *, rule: Rule):
    """Tokens of C = 1, one after the other."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        after[...] = before[...]

    if residuals is not None:
        residuals[...] = after[...]

    def one(t, _):
        tokens, reset = _read_token(x, t)
        after[...], y[:, pl.ds(t, 1), :] = _through_token(
            tokens, after[...], empty[...], reset, rule
        )

    jax.lax.fori_loop(0, x.q.shape[1], one, None)


def token_backward(
    x: Inputs,
    empty,
    residuals,
    d_after,
    d_y,
    d_x: Inputs,
    d_start,
    d_empty,
    memories,
    *,
    rule: Rule,
):
    """Cotangents of tokens of C = 1; `memories` [C, ., M, V] holds them all."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        d_start[...] = d_after[...]
        d_empty[...] = jnp.zeros(d_empty.shape, F32)

    size = x.q.shape[1]
    memories[0] = residuals[...]

    def recompute(t, _):
        tokens, reset = _read_token(x, t)
        after = _through_token(tokens, memories[t], empty[...], reset, rule)[0]
        memories[t + 1] = after

    def vjp(i, _):
        t = size - 1 - i
        tokens, reset = _read_token(x, t)

        def through(tokens, start, empty):
            return _through_token(tokens, start, empty, reset, rule)

        pull = jax.vjp(through, tokens, memories[t], empty[...])[1]
        at = pl.ds(t, 1)
        d_tokens, d_start[...], d_fresh = pull((d_start[...], d_y[:, at, :]))
        d_empty[...] += d_fresh
        d_x.q[:, at, :] = d_tokens.q
        d_x.k[:, at, :] = d_tokens.k
        d_x.v[:, at, :] = d_tokens.v
        shape = (d_x.gates.shape[0], 1, d_x.gates.shape[2])
        first = jax.lax.broadcasted_iota(jnp.int32, shape, 2) == 0
        d_x.gates[:, at, :] = jnp.where(first, d_tokens.gamma, 0.0)

    jax.lax.fori_loop(0, size - 1, recompute, None)
    jax.lax.fori_loop(0, size, vjp, None)


def _read_chunk(x: Inputs) -> tuple[chunk.Tokens, list[Array]]:
    rows = [x.gates[:, i, :] for i in range(x.gates.shape[1])]
    flags = [row[:, :1][:, :, None] for row in rows[1:]]
    return chunk.Tokens(x.q[...], x.k[...], x.v[...], rows[0][:, :, None], None), flags


def _through_chunk(tokens, start, empty, flags, rule, multiply):
    full, *reset = flags
    if reset:
        start = _choose(reset[0], empty, start)
    after, y = chunk.advance(tokens, start, rule, multiply)
    # A chunk that stays open leaves the memory at its start.
    return _choose(full, after, start), y


def _read_token(x: Inputs, t) -> tuple[chunk.Tokens, Array | None]:
    at = pl.ds(t, 1)
    gates = x.gates[:, at, :]
    reset = gates[:, :, 1:2] if gates.shape[-1] > 1 else None
    q, k, v = x.q[:, at, :], x.k[:, at, :], x.v[:, at, :]
    return chunk.Tokens(q, k, v, gates[:, :, :1], None), reset


def _through_token(tokens, start, empty, reset, rule):
    if reset is not None:
        start = _choose(reset, empty, start)
    return chunk.token(tokens, start, rule, chunk.SUMS)


def _choose(flag: Array, new: Array, old: Array):
    """`new` where the flag [., 1, 1] is 1."""
    return jnp.where(jnp.broadcast_to(flag, new.shape) > 0.5, new, old)
