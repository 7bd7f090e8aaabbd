"""Conditional change of a state: values, derivatives, compiled form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels._src.common.steps.in_place import change_if


def double(state, factor):
    return {"a": state["a"] * factor, "n": state["n"] + 1}


@pytest.mark.parametrize("needed", [True, False])
def test_values_and_gradients_are_those_of_a_conditional(needed):
    state = {"a": jnp.arange(3.0), "n": jnp.int32(0)}

    def loss(a, factor):
        after = change_if(double, jnp.bool_(needed), state | {"a": a}, factor)
        return (after["a"] ** 2).sum(), after["n"]

    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, n), gradients = both(state["a"], jnp.float32(3))
    factor = 3.0 if needed else 1.0
    np.testing.assert_allclose(value, 5 * factor**2)
    assert n == needed
    np.testing.assert_allclose(gradients[0], 2 * factor**2 * np.arange(3))
    np.testing.assert_allclose(gradients[1], 2 * 3 * 5 if needed else 0)


def test_without_derivatives_it_is_a_loop():
    def change(state):
        return change_if(double, jnp.bool_(True), state, jnp.float32(2))

    state = {"a": jnp.ones(3), "n": jnp.int32(0)}
    text = str(jax.make_jaxpr(change)(state))
    assert "while[" in text and "cond[" not in text
