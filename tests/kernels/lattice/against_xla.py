"""The TPU kernels of Lattice against the XLA form: inputs, results, gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from memjax_kernels import LatticeState, lattice_state
from memjax_kernels._src.lattice import Rule
from memjax_kernels._src.lattice.chunked import in_chunks
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu
from tests.kernels.on_tpu import INTERPRETER

INTERPRETED = functools.partial(lattice_tpu, interpret=INTERPRETER)


def draw(batch, time, heads, slots, width, dtype=jnp.float32) -> Any:
    """Queries, keys, values and step sizes."""
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(i, size):
        return jax.random.normal(keys[i], (batch, time, heads, size))

    tokens = normal(0, slots), jax.nn.softmax(normal(1, slots)), normal(2, width)
    gamma = jax.random.uniform(keys[3], (batch, time, heads))
    return *(x.astype(dtype) for x in tokens), gamma


def rows(seed, *shape):
    x = jax.random.normal(jax.random.key(seed), shape)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def both(form, variant, tokens, state, reset, empty, *, in_phase=False):
    """Results, and gradients of everything for random cotangents.

    `in_phase` hides from the implementation where in its chunk each row stands.
    """

    def forward(tokens, start, pending, empty):
        before = LatticeState(
            start, pending, state.decay, state.position, state.chunk_size
        )
        fresh = lattice_state(empty, state.chunk_size)
        if in_phase:
            # Tokens of chunks that start here: from the memory as the empty one.
            before, fresh = None, lattice_state(start, state.chunk_size)
        given: Any = (*tokens, None, before, reset, fresh, Rule(variant))
        after, y = in_chunks(form, *given)
        return y, after.start, after.pending

    def pull(*arguments):
        values, back = jax.vjp(forward, *arguments)
        keys = jax.random.split(jax.random.key(7), 3)
        return values, back(
            tuple(
                map(
                    lambda key, x: jax.random.normal(key, x.shape).astype(x.dtype),
                    keys,
                    values,
                )
            )
        )

    return jax.jit(pull)(tokens, state.start, state.pending, empty)
