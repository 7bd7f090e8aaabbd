"""The sum of tanh by XLA, some keys at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.common import partition

# Keys scored at a time, so that their scores stay in the CPU's cache.
KEYS_AT_ONCE = 1024


def sum_tanh(
    queries: Float[Array, "B T K"], keys: Float[Array, "B M K"]
) -> Float32[Array, "B M"]:
    """Σ_t tanh(q_t · k_j) of each key."""
    # XLA would gather the keys before it cuts them into blocks.
    return partition.by_rows(jax.vmap(_of_one))(queries, keys)


def _of_one(queries, keys):
    ones = jnp.ones(len(queries), jnp.float32)

    def some(keys):
        products = jnp.matmul(keys, queries.T, preferred_element_type=jnp.float32)
        return jnp.tanh(products) @ ones

    # Slicing the keys in the loop avoids the copy that a reshape to blocks makes.
    size = min(KEYS_AT_ONCE, len(keys))
    whole = len(keys) - len(keys) % size
    starts = jnp.arange(0, whole, size, dtype=jnp.int32)
    found = jax.lax.map(
        lambda at: some(jax.lax.dynamic_slice_in_dim(keys, at, size)), starts
    ).reshape(-1)
    return jnp.concatenate([found, some(keys[whole:])])
