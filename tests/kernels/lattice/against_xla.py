"""The TPU kernels of Lattice against the XLA form: inputs, results, gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from memjax_kernels import LatticeState, lattice_state
from memjax_kernels._src.lattice import Rule
from memjax_kernels._src.lattice.chunked import in_chunks
from memjax_kernels._src.lattice.memory import LatticeTokens
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu
from tests.kernels.on_tpu import INTERPRETER

INTERPRETED = functools.partial(lattice_tpu, interpret=INTERPRETER)


def draw(batch, time, heads, slots, width, dtype=jnp.float32, seed=0) -> Any:
    """Queries, keys, values and step sizes."""
    keys = jax.random.split(jax.random.key(seed), 4)

    def normal(i, size):
        return jax.random.normal(keys[i], (batch, time, heads, size))

    tokens = normal(0, slots), jax.nn.softmax(normal(1, slots)), normal(2, width)
    gamma = jax.random.uniform(keys[3], (batch, time, heads))
    return *(x.astype(dtype) for x in tokens), gamma


def rows(seed, *shape):
    x = jax.random.normal(jax.random.key(seed), shape)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def open_state(start, place, size) -> LatticeState:
    """A state with tokens at the first places of a chunk."""
    b, h, m, v = start.shape
    opened = [jnp.moveaxis(x, 2, 1) for x in draw(b, size, h, m, v, seed=5)[1:]]
    here = jnp.arange(size)[None] < place[:, None]
    k, v, gamma = (
        jnp.where(here.reshape(b, 1, size, *[1] * (x.ndim - 3)), x, 0) for x in opened
    )
    return LatticeState(start, LatticeTokens(k, v, gamma, -0.2 * gamma), place, size)


def both(form, variant, tokens, state, reset, empty, *, in_phase=False):
    """Results, and gradients of everything for random cotangents.

    `in_phase` hides from the implementation where in its chunk each row stands.
    """

    def forward(tokens, start, opened, empty):
        opened = opened and state.tokens._replace(**opened)
        before = LatticeState(start, opened, state.position, state.chunk_size)
        fresh = lattice_state(empty, state.chunk_size)
        if in_phase:
            # Tokens of chunks that start here: from the memory as the empty one.
            before, fresh = None, lattice_state(start, state.chunk_size)
        given: Any = (*tokens, None, before, reset, fresh, Rule(variant))
        after, y = in_chunks(form, *given)
        # Gates that forget have no gradient here.
        return y, after.start, after.tokens and after.tokens[:3]

    def pull(*arguments):
        values, back = jax.vjp(forward, *arguments)
        leaves, tree = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        weights = [
            jax.random.normal(key, x.shape).astype(x.dtype)
            for key, x in zip(keys, leaves, strict=True)
        ]
        return values, back(jax.tree.unflatten(tree, weights))

    # Without the gates, which only forget.
    opened = state.tokens and state.tokens._asdict()
    opened = opened and {name: opened[name] for name in ("k", "v", "gamma")}
    return jax.jit(pull)(tokens, state.start, opened, empty)
