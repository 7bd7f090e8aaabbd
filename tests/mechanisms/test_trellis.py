"""Stability of the recurrence of Trellis under large targets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.mechanisms import TrellisConfig

TIME, WORDS = 512, 32


@functools.cache
def outputs_and_gradient(target_scale, normalize_target=True):
    """Outputs for a long text, and the norm of the last one's gradient."""
    params, gradient = program(normalize_target)
    target = params.cell.target * target_scale
    params = params._replace(cell=params.cell._replace(target=target))
    gradients, y = gradient(params)
    return y, float(optax.tree.norm(gradients))


@functools.cache
def program(normalize_target):
    config = TrellisConfig(
        model_dim=16,
        num_heads=2,
        key_dim=8,
        value_dim=8,
        slots=16,
        chunk_size=4,
        normalize_target=normalize_target,
    )
    memory = config.build()
    # A few vectors that repeat, as words do.
    words = jax.random.normal(jax.random.key(1), (WORDS, config.model_dim))
    x = words[jax.random.randint(jax.random.key(2), (1, TIME), 0, WORDS)]

    def last(params):
        _, y = memory.apply(params, memory.init_state(1), x)
        return jnp.sum(y[:, -1] ** 2), y

    params = jax.jit(memory.init_params)(jax.random.key(0))
    return params, jax.jit(jax.grad(last, has_aux=True))


@pytest.mark.slow
def test_gradients_through_a_long_text_stay_small():
    for scale in (1.0, 100.0):
        assert outputs_and_gradient(scale)[1] < 10, scale


@pytest.mark.slow
def test_large_targets_make_gradients_explode_unless_normalised():
    _, norm = outputs_and_gradient(100.0, normalize_target=False)
    assert norm > 1000


@pytest.mark.slow
def test_outputs_do_not_depend_on_the_scale_of_targets():
    one, other = (outputs_and_gradient(scale)[0] for scale in (1.0, 100.0))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_readout_is_of_phi_where_it_is_asked_for():
    config = TrellisConfig(
        8, num_heads=2, key_dim=4, value_dim=4, slots=4, chunk_size=2, phi="silu"
    )
    drawn = iter(jax.random.split(jax.random.key(0), 5))
    q, k, v = (jax.random.normal(next(drawn), (1, 6, 2, 4)) for _ in range(3))
    x = jax.random.normal(next(drawn), (1, 6, 8))

    def outputs(readout):
        cell = dataclasses.replace(config, readout=readout).cell()
        params = cell.init_params(jax.random.key(1))
        return cell.apply(params, None, q, k, v, x)[1]

    linear, phi = jax.jit(lambda: (outputs("linear"), outputs("phi")))()
    np.testing.assert_allclose(phi, jax.nn.silu(linear), rtol=1e-5, atol=1e-6)
    assert np.abs(phi - linear).max() > 0.1 * np.abs(linear).max()
