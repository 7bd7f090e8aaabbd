"""Gradients of every order of an op of kernels, and the number of kernel calls."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax_kernels._src.common import gradients


def form(power, memory, x):
    """Something whose derivatives of all orders differ."""
    return memory * jnp.sin(x), memory**power * jnp.exp(x)


def op_that_counts():
    """The op of `form`, and the kernels that ran, in order."""
    calls = []

    def forward(power, memory, x, *, with_residuals):
        calls.append("keeping" if with_residuals else "forward")
        return form(power, memory, x), (jnp.exp(x) if with_residuals else None)

    def backward(power, primals, residuals, cotangents):
        calls.append("backward")
        memory, x = primals
        d_memory, d_y = cotangents
        by_memory = (
            jnp.sin(x) * d_memory + power * memory ** (power - 1) * residuals * d_y
        )
        return by_memory, memory * jnp.cos(
            x
        ) * d_memory + memory**power * residuals * d_y

    return gradients.of_kernels("op", forward, backward, form), calls


MEMORY, X = jnp.array([0.5, 2.0]), jnp.array([0.3, -1.0])


def total(function):
    return lambda memory, x: sum(jnp.sum(a**2) for a in function(3, memory, x))


def test_kernels_give_values_and_the_first_gradient():
    op, calls = op_that_counts()
    total(op)(MEMORY, X)
    assert calls == ["forward"]
    found = jax.grad(total(op), (0, 1))(MEMORY, X)
    assert calls[1:] == ["keeping", "backward"]
    expected = jax.jit(jax.grad(total(form), (0, 1)))(MEMORY, X)
    np.testing.assert_allclose(found, expected, 1e-6)


def test_second_and_third_gradients_are_those_of_the_form():
    def penalty(function):
        first = jax.grad(function, (0, 1))
        return lambda *at: sum(jnp.sum(d**2) for d in first(*at))

    op, _ = op_that_counts()
    for order in (penalty, lambda f: penalty(penalty(f))):
        found, expected = (
            jax.jit(jax.grad(order(total(f)), (0, 1)))(MEMORY, X) for f in (op, form)
        )
        np.testing.assert_allclose(found, expected, 1e-5)
