"""The TPU kernels of Trellis against the XLA form: inputs, results, gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from memjax_kernels import TrellisState, trellis_init_state
from memjax_kernels._src.trellis import segment
from memjax_kernels._src.trellis.pallas_tpu import trellis_tpu
from tests.kernels.on_tpu import INTERPRETER

INTERPRETED = functools.partial(trellis_tpu, interpret=INTERPRETER)


def draw(batch, time, heads, key, value, slots, dtype=jnp.float32, gates=(2,)) -> Any:
    keys = jax.random.split(jax.random.key(0), 6)

    def normal(i, *width):
        return jax.random.normal(keys[i], (batch, time, heads, *width))

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    tokens = unit(normal(0, key)), unit(normal(1, key)), normal(2, value)
    tokens = (*tokens, 0.3 * normal(3, slots))
    gamma = jax.nn.sigmoid(normal(4, *gates))
    g = jax.nn.log_sigmoid(normal(5, *gates) + 1)
    return *(x.astype(dtype) for x in tokens), gamma, g


def in_chunks(implementation, tokens, state, empty, reset=None):
    given: Any = (*tokens, state, reset, empty)
    return segment.in_chunks(
        implementation, *given, phi="l2_silu", activation="ln_silu"
    )


def perturbed(state, seed):
    """Another state, its chunks open where its position is not 0."""
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef,
        list(
            map(
                lambda x, key: (
                    x + 0.3 * jax.random.normal(key, x.shape) if x.ndim == 4 else x
                ),
                leaves,
                keys,
            )
        ),
    )


def open_state(sizes, place):
    """A state whose batch elements are `place` tokens into their chunks."""
    state = perturbed(trellis_init_state(*sizes), 1)
    place = jnp.array(place, jnp.int32)
    is_open = (place > 0)[:, None, None, None]
    keys = jnp.where(is_open, state.keys, state.keys_start)
    values = jnp.where(is_open, state.values, state.values_start)
    size = state.chunk_size
    return TrellisState(state.keys_start, keys, state.values_start, values, place, size)


def both(implementation, arguments, reset=None):
    """Results, and gradients of everything for random cotangents."""

    def pull(arguments):
        def floats(tree):
            return jax.tree.map(lambda x: None if x.dtype == jnp.int32 else x, tree)

        def whole(floats):
            return jax.tree.map(
                lambda f, x: x if f is None else f,
                floats,
                arguments,
                is_leaf=lambda f: f is None,
            )

        def forward(given):
            tokens, state, empty = whole(given)
            after, y = in_chunks(implementation, tokens, state, empty, reset)
            return after.memories, y

        values, back = jax.vjp(forward, floats(arguments))
        leaves, treedef = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(7), len(leaves))
        weights = [
            jax.random.normal(key, x.shape).astype(x.dtype)
            for x, key in zip(leaves, keys, strict=True)
        ]
        return values, back(jax.tree.unflatten(treedef, weights))

    return jax.jit(pull)(arguments)
