"""Counts of tokens near the end of int32."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms import AttentionConfig, ElasticMemoryConfig
from memjax.mechanisms.layers.saturating_counter import LAST


def test_a_memory_is_finite_after_any_number_of_tokens():
    """At 2**31 the count was negative, and the memory NaN."""
    mechanism = ElasticMemoryConfig(16, 2, 1, 8, block=4, order=6).build()
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 12, 16))
    state = mechanism.init_state(1)._replace(length=jnp.array([LAST - 4]))
    apply = jax.jit(mechanism.apply)
    for _ in range(2):
        state, y = apply(params, state, x)
        assert state.length == LAST and np.isfinite(y).all()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_attention_beyond_its_capacity_stays_nan():
    """A count that ran over would be a position of the cache again."""
    mechanism = AttentionConfig(16, 2, 1, 8, capacity=8).build()
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    state = mechanism.init_state(1)._replace(length=jnp.array([2**31 - 2]))
    step = jax.jit(mechanism.step)
    for _ in range(2):
        state, y = step(params, state, jnp.ones((1, 16)))
        assert np.isnan(y).all() and state.length > 8
