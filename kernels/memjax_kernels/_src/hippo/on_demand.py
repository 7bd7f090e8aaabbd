"""HiPPO-LegS matrices inside jit, for block edges known only at run time.

The closed forms of `bank.py` with no table, hence no limit on the history.
Differences of antiderivatives cancel, so Legendre values are taken in float64
(on a TPU in pairs of float32) and only finished matrices are rounded to float32.
Every array starts with R: 1 where all batch elements share their edges, else B.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from memjax_kernels._src.hippo import bank
from memjax_kernels._src.hippo.pallas_tpu import legendre_tpu

HIGHEST = jax.lax.Precision.HIGHEST
#: Columns of a signal that a TPU multiplies at a time, or half of that.
COLUMNS = 256


def kernel(
    order: int, start: Int[Array, " R"], stop: Int[Array, " R"], length: int
) -> Float[Array, "R N length"]:
    """Projects `length` tokens from `start` onto a history of `stop` tokens.

    Tokens at or beyond `stop` get zero columns, so `stop` may cut a block short.
    """
    with jax.enable_x64(True):
        tokens = start[:, None] + jnp.arange(length + 1, dtype=jnp.int32)[None]
        # A history of no tokens has no edges; the next lines give it columns of zeros.
        end = jnp.maximum(stop, 1)[:, None].astype(jnp.float64)
        edges = jnp.minimum(tokens.astype(jnp.float64), end) / end
        edges = jnp.where(stop[:, None] > 0, edges, 0.0)

        def column_integrals(before, _, after):
            # The difference cancels, so that it is rounded after it is taken and not
            # before.
            return jnp.diff(after - before, axis=-1).astype(jnp.float32)

        integrals = _by_degree(order, 2 * edges - 1, column_integrals)
    norms = jnp.asarray(2 * np.sqrt(2 * np.arange(order) + 1), jnp.float32)
    return integrals / norms[None, :, None]


def advance(
    start: Int[Array, " R"], stop: Int[Array, " R"], coefficients: Float[Array, "B N X"]
) -> Float[Array, "B N X"]:
    """Moves coefficients of `start` tokens to `stop` tokens: (start/stop)**A C.

    Two factors, N*N floats each, that live for this call only. No past gives 0.
    """
    order = coefficients.shape[1]
    factor = from_nodes(order, jnp.zeros_like(start), start, stop)
    return product(factor, to_nodes(coefficients))


def absorb(
    start: Int[Array, " R"],
    stop: Int[Array, " R"],
    past: Float[Array, "B N X"],
    block: Float[Array, "B N X"],
) -> Float[Array, "B N X"]:
    """Coefficients of `stop` tokens: of `start` tokens, and of the tokens behind them.

    Args:
        start: tokens of the past.
        stop: all tokens.
        past: values at the nodes of its own span, as `to_nodes` makes them.
        block: those of the tokens from `start` to `stop`.
    """
    none = jnp.zeros_like(start)
    first, last = jnp.concatenate([none, start]), jnp.concatenate([start, stop])
    # One recurrence for both factors.
    factors = from_nodes(past.shape[1], first, last, jnp.concatenate([stop, stop]))
    of_past, of_block = jnp.split(factors, 2)
    return product(of_past, past) + product(of_block, block)


def to_nodes(coefficients: Float[Array, "B N X"]) -> Float[Array, "B N X"]:
    """Values at the Gauss nodes of the span, times the roots of their weights."""
    nodes, weights = bank.gauss_legendre(coefficients.shape[1])
    with jax.enable_x64(True):
        points = jnp.asarray(nodes)[None]
    # Not a constant of the program: it would have N x N numbers, 300 MB for N = 8,640.
    evaluate = basis(len(nodes), points) * _root(weights)[:, None]
    return product(jnp.swapaxes(evaluate, 1, 2), coefficients)


def block_at_nodes(
    order: int, features: Float[Array, "B L X"]
) -> Float[Array, "B N X"]:
    """`to_nodes` of the coefficients that a block's tokens have for themselves.

    Where the block lies in the history does not matter: there its polynomials are
    polynomials again, of no higher degree. So N points are evaluated for each block,
    and not the edges of its L tokens.
    """
    kernel = jnp.asarray(_block_to_nodes(order, features.shape[1]))[None]
    return product(kernel, features)


def from_nodes(
    order: int, first: Int[Array, " R"], last: Int[Array, " R"], stop: Int[Array, " R"]
) -> Float[Array, "R N N"]:
    """From values at the nodes of tokens `first` to `last` to coefficients of `stop`.

    With nodes u and weights w in [a, b] = [first, last] / stop it is
    (b - a) g(a + (b - a) u) sqrt(w), as `to_nodes` has taken the other root.
    """
    nodes, weights = bank.gauss_legendre(order)
    with jax.enable_x64(True):
        # float32 would round a long history's ratio to 1: time would stand still.
        first, last, end = (
            x.astype(jnp.float64) for x in (first, last, jnp.maximum(stop, 1))
        )
        begin, span = first / end, (last - first) / end
        points = begin[:, None] + span[:, None] * jnp.asarray(nodes, jnp.float64)[None]
        scale = span.astype(jnp.float32)[:, None] * _root(weights)
    return basis(order, points) * scale[:, None]


def basis(order: int, points: Float[Array, "R Q"]) -> Float[Array, "R N Q"]:
    """Evaluates g_n for n below `order`, at float64 points of [0, 1]."""
    with jax.enable_x64(True):
        z = 2 * points - 1
        high = z.astype(jnp.float32)
        low = (z - high.astype(z.dtype)).astype(jnp.float32)
        values = jax.lax.platform_dependent(
            z,
            high,
            low,
            tpu=lambda _, high, low: _legendre_tpu(order, high, low),
            default=lambda z, _, __: _by_degree(
                order, z, lambda _, now, __: now.astype(jnp.float32)
            ),
        )
    norms = jnp.asarray(np.sqrt(2 * np.arange(order) + 1), jnp.float32)
    return values * norms[None, :, None]


def _legendre_tpu(order, high, low):
    # The kernel's own indices are of 32 bits.
    with jax.enable_x64(False):
        return legendre_tpu(order, high, low)


def product(
    matrix: Float[Array, "R N Q"], signal: Float[Array, "B Q X"]
) -> Float[Array, "B N X"]:
    """Multiplies each batch element's signal by its own matrix, or all by one."""
    return jax.lax.platform_dependent(matrix, signal, tpu=_by_columns, default=_at_once)


def _by_columns(matrix, signal):
    """In a loop: XLA writes out all of an exact product whose operands fit in VMEM.

    Of 540 x 540 by 540 x 1,536 that was 45,000 bundles, with as many cycles, which
    took 90 s to compile.
    """
    batch, rows, width = signal.shape
    columns = math.gcd(width, COLUMNS)
    if columns < COLUMNS // 2 or batch * width == columns:
        return _at_once(matrix, signal)
    if len(matrix) > 1:
        each = matrix[:, None], signal[:, None]
        return jax.lax.map(lambda pair: _by_columns(*pair), each)[:, 0]
    parts = signal.reshape(batch, rows, -1, columns).transpose(0, 2, 1, 3)
    parts = jax.lax.map(
        lambda part: _at_once(matrix, part[None])[0],
        parts.reshape(-1, rows, columns),
    )
    parts = parts.reshape(batch, -1, *parts.shape[1:]).transpose(0, 2, 1, 3)
    return parts.reshape(batch, -1, width)


def _at_once(matrix, signal):
    # One matrix for all: a product without a batch axis is larger and faster.
    if matrix.shape[0] == 1:
        return jnp.einsum("nq,bqx->bnx", matrix[0], signal, precision=HIGHEST)
    return jnp.einsum("bnq,bqx->bnx", matrix, signal, precision=HIGHEST)


def _root(weights):
    return jnp.asarray(weights**0.5, jnp.float32)[None]


@functools.lru_cache(maxsize=8)
def _block_to_nodes(order, length):
    """[N, L] in float32."""
    nodes, weights = bank.gauss_legendre(order)
    at_nodes = (bank.legendre(order, nodes) * weights**0.5).T
    return (at_nodes @ bank.block_kernel(order, 0, length)).astype(np.float32)


def _by_degree(order, z, emit):
    """Stacks emit(P_{n-1}, P_n, P_{n+1}) at z for n below `order`, on axis 1."""
    n = np.arange(order, dtype=np.float64)

    def next_degree(pair, ratio):
        before, now = pair
        # ((2 n + 1) z P_n - n P_{n-1}) / (n + 1): a division takes longer.
        ahead = z * now
        after = ahead + ratio * (ahead - before)
        return (now, after), emit(before, now, after)

    with jax.enable_x64(True):
        # P_{-1} = -1 makes the antiderivative of degree 0 equal to x.
        start = (-jnp.ones_like(z), jnp.ones_like(z))
        _, rows = jax.lax.scan(next_degree, start, jnp.asarray(n / (n + 1)))
    return jnp.moveaxis(rows, 0, 1)
