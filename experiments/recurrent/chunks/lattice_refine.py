"""The exact recurrence of C = 1, a chunk at a time: gates estimated until they hold.

Equations 13 and 14 are linear in the memory once two numbers per slot and token are
known, p = <s_i, h> and |h|^2 of the memory before the token (w = gamma c):

    s_i <- a_i s_i - b_i h,  a_i = beta_i (1 + w_i p_i),  b_i = beta_i w_i,
    beta_i = (1 + w_i^2 (|h|^2 - p_i^2))^{-1/2}

so a chunk is solved for given gates a and b, and yields p and |h|^2, and so gates:

    X_t = a_1 ... a_t,  E_tj = a_{j+1} ... a_{t-1}  (per slot)
    p_ti = X_{t-1,i} <s_i, h_t> - sum_{j<t} E_tji b_ji <h_j, h_t>

What is linear in the memory stays implicit, as in the delta rule. "dec": h_t depends on
the h before it, (I + L) H = (K X) M' - V with L_tj = sum_i k_ti E_tji b_ji. "enc": p is
in c = p - k, so each slot solves (I + L_i) p_i = X_i <s_i, v> + L_i k_i with L_itj =
E_tji beta_ji gamma_j <v_j, v_t>.

Token t's gates depend on tokens before it only, so n rounds make the first n tokens
exact, and C rounds all of them; in practice a few do. The products E are formed without
division, since a gate may be zero or negative; they make a round cost C^2 M.

On the CPU of experiments/results/recurrent/lattice_chunks.json this is slower than the
scan over tokens at every setting. It has not been measured on an accelerator.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels import (
    LATTICE_VARIANTS,
    LatticeState,
    LatticeVariant,
    lattice_init_state,
    lattice_state,
)
from memjax_kernels._src.common.arguments import check_choice, check_range, check_shapes
from memjax_kernels._src.lattice.sphere import l2_normalize

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def lattice_refined(
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    state: LatticeState | None = None,
    *,
    variant: LatticeVariant = "dec",
    chunk_size: int = 16,
    tolerance: float = 1e-6,
) -> tuple[LatticeState, Float[Array, "B T H V"], Int[Array, " n"]]:
    """`lattice` with chunk_size=1, normalised and without forgetting, in chunks.

    Holds chunk_size^2 products for every slot. Not differentiable in reverse: the
    number of rounds is found at run time.

    Args:
        q: queries over the M slots.
        k: keys over the slots.
        v: values.
        gamma: step sizes, at least 0.
        state: a state of chunk_size 1; None is the empty memory.
        variant: as `lattice`.
        chunk_size: tokens solved at a time, at least 1; the result does not depend on
            it, but for rounding and `tolerance`.
        tolerance: rounds end when no p and no |h| changes by more than this share of
            |h|, or after chunk_size of them; at least 0.

    Returns:
        The memory after the segment, of chunk_size 1; the reads; and the rounds that
        each of the n = ceil(T / chunk_size) chunks took, those of its slowest row.

    Raises:
        ValueError: on shapes that do not fit, known step sizes or a tolerance below 0,
            an unknown variant, a chunk_size below 1, or a state of another chunk.
    """
    sizes = check_shapes(
        q=(q, "B T H M"),
        k=(k, "B T H M"),
        v=(v, "B T H V"),
        gamma=(gamma, "B T H"),
        state=(None if state is None else state.start, "B H M V"),
    )
    check_choice("variant", variant, LATTICE_VARIANTS)
    check_range("gamma", gamma, 0.0, float(jnp.finfo(jnp.float32).max))
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    if state is not None and state.chunk_size != 1:
        raise ValueError(f"state must be of chunk_size=1, got {state.chunk_size}")
    if state is None:
        b, h, m, width = (sizes[letter] for letter in "BHMV")
        state = lattice_init_state(b, h, m, width, 1)

    time, dtype = sizes["T"], state.start.dtype

    def cut(x):
        # [B, T, H, ...] -> [n, B, H, C, ...]; a token of zeros writes nothing.
        tail = [(0, 0), (0, -time % chunk_size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x.astype(dtype), tail)
        x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    tokens = cut(q), cut(k), cut(v), cut(gamma[..., None])
    body = functools.partial(_chunk, variant=variant, tolerance=tolerance)
    start, (y, rounds) = jax.lax.scan(body, state.start, tokens)
    y = jnp.moveaxis(y, (0, 2), (1, 3)).reshape(v.shape[0], -1, *v.shape[2:])
    return lattice_state(start, 1), y[:, :time].astype(v.dtype), rounds


class _Solved(NamedTuple):
    """A chunk for given gates."""

    h: Float[Array, "B H C V"]
    p: Float[Array, "B H C M"]
    squares: Float[Array, "B H C 1"]


def _chunk(start, tokens, *, variant, tolerance):
    q, k, v, gamma = tokens
    solve = functools.partial(_solve, start, k, v, variant)

    def again(carry):
        solved, _, rounds = carry
        new = solve(*_gates(solved, k, gamma, variant)[:3])
        return new, _change(new, solved), rounds + 1

    def unfinished(carry):
        _, change, rounds = carry
        return (change > tolerance) & (rounds < k.shape[2])

    carry = (
        _first(start, k, v, variant),
        jnp.asarray(jnp.inf, start.dtype),
        jnp.zeros((), jnp.int32),
    )
    solved, _, rounds = jax.lax.while_loop(unfinished, again, carry)

    a, b, _, kept = _gates(solved, k, gamma, variant)
    between = _between(a)
    scores = _dot("bhtm,bhtjm,bhjm->bhtj", q * a, between, b)
    scores += _diagonal(jnp.sum(q * b, axis=-1))
    y = _dot("bhtm,bhmv->bhtv", q * kept, start)
    y -= _dot("bhtj,bhjv->bhtv", scores, solved.h)
    left = between[:, :, -1] * a[:, :, -1:] * b
    left = left.at[:, :, -1].set(b[:, :, -1])
    after = kept[:, :, -1, :, None] * start - _dot("bhjm,bhjv->bhmv", left, solved.h)
    return l2_normalize(after), (y, rounds)


def _first(start, k, v, variant):
    """The first estimate: all tokens meet the memory of the chunk's start."""
    h = v if variant == "enc" else -v
    if variant == "dec":
        h += _dot("bhtm,bhmv->bhtv", k, start)
    p = _dot("bhtv,bhmv->bhtm", h, start)
    return _Solved(h, p, jnp.sum(h * h, axis=-1, keepdims=True))


def _gates(solved, k, gamma, variant):
    """a, b, beta gamma and X, all [B, H, C, M], for what was solved."""
    c = solved.p - k if variant == "enc" else k
    write = gamma * c
    across = jnp.maximum(solved.squares - solved.p**2, 0.0)
    beta = jax.lax.rsqrt(1 + write**2 * across)
    a = beta * (1 + write * solved.p)
    return a, beta * write, beta * gamma, _running(a)


def _solve(start, k, v, variant, a, b, rate):
    """h, p and |h|^2 of a chunk whose gates are a, b, and beta gamma for "enc"."""
    between = _between(a)
    before = _running(a)
    before = jnp.concatenate([jnp.ones_like(a[:, :, :1]), before[:, :, :-1]], axis=2)
    h = v if variant == "enc" else -v
    if variant == "dec":
        system = _dot("bhtm,bhtjm,bhjm->bhtj", k, between, b)
        met = _dot("bhtm,bhmv->bhtv", k * before, start)
        h = _substitute(system, met - v)
    gram = _dot("bhtv,bhjv->bhtj", h, h)
    p = before * _dot("bhtv,bhmv->bhtm", h, start)
    if variant == "enc":
        system = between * gram[..., None] * rate[:, :, None]
        p += _dot("bhtjm,bhjm->bhtm", system, k)
        p = _substitute(jnp.moveaxis(system, -1, 2), jnp.swapaxes(p, 2, 3)[..., None])
        p = jnp.swapaxes(p[..., 0], 2, 3)
    else:
        p -= _dot("bhtjm,bhtj,bhjm->bhtm", between, gram, b)
    return _Solved(h, p, jnp.sum(h * h, axis=-1, keepdims=True))


def _between(a: Float[Array, "B H C M"]) -> Float[Array, "B H C C M"]:
    """E: products of a over the tokens between j and t, 0 where j >= t."""
    size = a.shape[2]
    token = jnp.arange(size)
    # Row t multiplies by a_{t-1} where j < t - 1.
    last = jnp.roll(a, 1, axis=2)[:, :, :, None]
    apart = (token[:, None] - 1 > token[None])[None, None, :, :, None]
    earlier = (token[:, None] > token[None])[None, None, :, :, None]
    return jnp.where(earlier, _running(jnp.where(apart, last, 1.0)), 0.0)


def _running(x: Float[Array, "B H C *X"]) -> Float[Array, "B H C *X"]:
    """Products up to and with each token; XLA's own take C^2 work on a CPU."""
    return jax.lax.associative_scan(jnp.multiply, x, axis=2)


def _substitute(below, right):
    """Solves (I + below) x = right, `below` strictly lower triangular."""
    return jax.scipy.linalg.solve_triangular(
        below, right, lower=True, unit_diagonal=True
    )


def _diagonal(x):
    return x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)[None, None]


def _change(new, old):
    """The largest change of p and of |h|, as a share of |h|."""
    size, former = jnp.sqrt(new.squares), jnp.sqrt(old.squares)
    change = jnp.maximum(jnp.abs(new.p - old.p), jnp.abs(size - former))
    # Tokens of zeros have h = 0, and change nothing.
    return jnp.max(change / jnp.maximum(size, jnp.finfo(size.dtype).tiny))
