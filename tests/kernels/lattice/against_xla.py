"""The TPU kernels of Lattice against the XLA form: inputs, results, gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax_kernels import LatticeState, lattice_state
from memjax_kernels._src.lattice import Rule
from memjax_kernels._src.lattice.memory import LatticeTokens
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu
from memjax_kernels._src.lattice.segment import in_chunks
from tests.kernels.on_tpu import INTERPRETER

INTERPRETED = functools.partial(lattice_tpu, interpret=INTERPRETER)
# Faster, for what does not depend on when memory is written.
PLAINLY_INTERPRETED = functools.partial(lattice_tpu, interpret=True)


def draw(batch, time, heads, slots, width, dtype=jnp.float32, seed=0) -> Any:
    """Queries, keys, values and step sizes."""
    draws = np.random.default_rng(seed)

    def normal(size):
        return draws.standard_normal((batch, time, heads, size), np.float32)

    q, k, v = normal(slots), np.exp(normal(slots)), normal(width)
    tokens = q, k / k.sum(-1, keepdims=True), v
    gamma = draws.random((batch, time, heads), np.float32)
    return *(jnp.asarray(x, dtype) for x in tokens), jnp.asarray(gamma)


def rows(seed, *shape):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def open_state(start, place, size) -> LatticeState:
    """A state with tokens at the first places of a chunk."""
    b, h, m, v = start.shape
    place = np.asarray(place, np.int32)
    here = np.arange(size)[None] < place[:, None]

    def token(x):
        x = np.moveaxis(np.asarray(x), 2, 1)
        return jnp.asarray(x * here.reshape(b, 1, size, *[1] * (x.ndim - 3)))

    k, v, gamma = map(token, draw(b, size, h, m, v, seed=5)[1:])
    tokens = LatticeTokens(k, v, gamma, -0.2 * gamma)
    return LatticeState(start, tokens, jnp.asarray(place), size)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="in_phase")
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
        given: Any = (*tokens, None, before, reset, fresh)
        after, y = in_chunks(functools.partial(form, rule=Rule(variant)), *given)
        # Gates that forget have no gradient here.
        return y, after.start, after.tokens and after.tokens[:3]

    # Without the gates, which only forget.
    opened = state.tokens and state.tokens._asdict()
    opened = opened and {name: opened[name] for name in ("k", "v", "gamma")}
    values, back = jax.vjp(forward, tokens, state.start, opened, empty)
    draws = np.random.default_rng(3)
    return values, back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )
