"""Evaluation of a traced function with other code for some primitives."""

import jax
import jax.numpy as jnp
import pytest

from memjax_kernels._src.common import jaxprs

DOUBLED = {"sin": lambda _, x: 2 * x[0]}


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda x, dx: (with_jvp(*x), dx[0]))
with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, dy: (dy,))


@pytest.mark.parametrize("call", [jnp.sin, jax.jit(jnp.sin), with_jvp, with_vjp])
def test_primitives_inside_calls_are_replaced(call):
    closed = jax.make_jaxpr(lambda x: call(x) + 1)(jnp.ones(3))
    (found,) = jaxprs.evaluate(closed, [jnp.arange(3.0)], DOUBLED)
    assert found.tolist() == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("scan", lambda x: jax.lax.scan(lambda c, _: (2 * c + 1, c), x, None, 5)[0]),
        ("while", lambda x: jax.lax.fori_loop(0, x[0].astype(int), lambda _, c: c, x)),
        ("cond", lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
    ],
)
def test_loops_and_branches_are_refused(name, function):
    # Run as one call, a scan would give the carry after a single iteration.
    closed = jax.make_jaxpr(function)(jnp.zeros(2))
    with pytest.raises(ValueError, match=f"must have no {name}"):
        jaxprs.evaluate(closed, [jnp.zeros(2)], {})
