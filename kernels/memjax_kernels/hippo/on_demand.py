"""HiPPO-LegS matrices inside jit, for block edges known only at run time.

The closed forms of `bank.py` with no table, hence no limit on the history.
Differences of antiderivatives cancel, so Legendre values are taken in float64
(which XLA emulates on TPU) and only finished matrices are rounded to float32.
Every array starts with R: 1 where all batch elements share their edges, else B.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels.hippo import bank

HIGHEST = jax.lax.Precision.HIGHEST


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

        def column_integrals(n, before, _, after):
            antiderivative = (after - before) / (2 * jnp.sqrt(2 * n + 1))
            # The difference cancels, so that it is rounded after it is taken and not
            # before.
            return jnp.diff(antiderivative, axis=-1).astype(jnp.float32)

        return _by_degree(order, edges, column_integrals)


def advance(
    start: Int[Array, " R"], stop: Int[Array, " R"], coefficients: Float[Array, "B N X"]
) -> Float[Array, "B N X"]:
    """Moves coefficients of `start` tokens to `stop` tokens: (start/stop)**A C.

    With r = start/stop, Gauss nodes u and weights w, r**A = (r g(r u) w) g(u)^T: two
    factors, N*N floats each, that live for this call only. No past, r = 0, gives 0.
    """
    order = coefficients.shape[1]
    return product(from_nodes(order, start, stop), to_nodes(coefficients))


def to_nodes(coefficients: Float[Array, "B N X"]) -> Float[Array, "B N X"]:
    """Applies the second factor: values at the nodes, times the roots of weights."""
    nodes, weights = bank.gauss_legendre(coefficients.shape[1])
    evaluate = basis(len(nodes), jnp.ones(1), nodes)[0] * _root(weights)
    return jnp.einsum("nq,bnx->bqx", evaluate, coefficients, precision=HIGHEST)


def from_nodes(
    order: int, start: Int[Array, " R"], stop: Int[Array, " R"]
) -> Float[Array, "R N N"]:
    """The first factor, which depends on the move."""
    nodes, weights = bank.gauss_legendre(order)
    with jax.enable_x64(True):
        # float32 would round a long history's ratio to 1: time would stand still.
        ratio = start.astype(jnp.float64) / jnp.maximum(stop, 1)
        scale = ratio.astype(jnp.float32)[:, None] * _root(weights)
    return basis(order, ratio, nodes) * scale[:, None]


def basis(order: int, ratio: Float[Array, " R"], points) -> Float[Array, "R N Q"]:
    """Evaluates g_n(ratio * points) for n below `order`."""
    with jax.enable_x64(True):
        x = ratio[:, None].astype(jnp.float64) * jnp.asarray(points, jnp.float64)[None]

        def value(n, _, now, __):
            return (jnp.sqrt(2 * n + 1) * now).astype(jnp.float32)

        return _by_degree(order, x, value)


def product(
    matrix: Float[Array, "R N Q"], signal: Float[Array, "B Q X"]
) -> Float[Array, "B N X"]:
    """Multiplies each batch element's signal by its own matrix, or all by one."""
    # One matrix for all: a product without a batch axis is larger and faster.
    if matrix.shape[0] == 1:
        return jnp.einsum("nq,bqx->bnx", matrix[0], signal, precision=HIGHEST)
    return jnp.einsum("bnq,bqx->bnx", matrix, signal, precision=HIGHEST)


def _root(weights):
    return jnp.asarray(weights**0.5, jnp.float32)[None]


def _by_degree(order, x, emit):
    """Stacks emit(n, P_{n-1}, P_n, P_{n+1}) at 2x-1 for n below `order`, on axis 1."""
    z = 2 * x - 1

    def next_degree(pair, n):
        before, now = pair
        after = ((2 * n + 1) * z * now - n * before) / (n + 1)
        return (now, after), emit(n, before, now, after)

    # P_{-1} = -1 makes the antiderivative of degree 0 equal to x.
    start = (-jnp.ones_like(z), jnp.ones_like(z))
    _, rows = jax.lax.scan(next_degree, start, jnp.arange(order, dtype=jnp.float64))
    return jnp.moveaxis(rows, 0, 1)
