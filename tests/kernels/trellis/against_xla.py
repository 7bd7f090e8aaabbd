"""The TPU kernels of Trellis against the XLA form: inputs, results, gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from memjax_kernels import TrellisState, trellis_init_state
from memjax_kernels._src.trellis import segment
from memjax_kernels._src.trellis.pallas_tpu import trellis_tpu
from memjax_kernels._src.trellis.state import TrellisTokens
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
    """Other memories."""

    def near(x, key):
        return x + 0.3 * jax.random.normal(key, x.shape)

    keys, values = jax.random.split(jax.random.key(seed))
    return dataclasses.replace(
        state, keys=near(state.keys, keys), values=near(state.values, values)
    )


def opened(state, tokens, place) -> TrellisState:
    """A state whose batch elements have the first `place` of tokens [B, C, H, ...]."""
    here = jnp.arange(state.chunk_size)[None] < place[:, None]

    def token(x):
        x = jnp.moveaxis(x.astype(jnp.float32), 2, 1)
        return jnp.where(here.reshape(-1, 1, here.shape[1], *[1] * (x.ndim - 3)), x, 0)

    of_state: Any = [token(x) for x in tokens[1:]]
    found = of_passes(*of_state)
    return dataclasses.replace(state, tokens=found, position=place)


def of_passes(k, v, alpha, gamma, g) -> TrellisTokens:
    """Tokens with gates [..., 2] of both passes."""
    gates = gamma[..., 0], gamma[..., 1], g[..., 0], g[..., 1]
    return TrellisTokens(k, v, alpha, *gates)


def both_passes(x: TrellisTokens | None) -> tuple[Any, ...] | None:
    """Undoes `of_passes`."""
    if x is None:
        return None
    gates = (x.key_gamma, x.value_gamma), (x.key_g, x.value_g)
    return (*x[:3], *(jnp.stack(pair, -1) for pair in gates))


def open_state(sizes, place):
    """A state whose batch elements are `place` tokens into their chunks."""
    b, h, m, k, v, c = sizes
    state = perturbed(trellis_init_state(*sizes), 1)
    if c == 1:
        return state
    tokens = draw(b, c, h, k, v, m)
    return opened(state, tokens, jnp.array(place, jnp.int32))


def both(implementation, arguments, reset=None, seed=7):
    """Results, and gradients of everything for random cotangents."""

    def pull(arguments):
        tokens, state, empty = arguments

        def floats(state):
            # Gates of both passes as one leaf, as those of the tokens are.
            return state and (state.keys, state.values, both_passes(state.tokens))

        def with_floats(state, found):
            if state is None:
                return None
            keys, values, opened = found
            opened = opened and of_passes(*opened)
            return dataclasses.replace(state, keys=keys, values=values, tokens=opened)

        def forward(tokens, *found):
            before, fresh = map(with_floats, (state, empty), found)
            after, y = in_chunks(implementation, tokens, before, fresh, reset)
            return floats(after), y

        values, back = jax.vjp(forward, tokens, floats(state), floats(empty))
        leaves, treedef = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        weights = [
            jax.random.normal(key, x.shape).astype(x.dtype)
            for x, key in zip(leaves, keys, strict=True)
        ]
        d_tokens, d_state, d_empty = back(jax.tree.unflatten(treedef, weights))
        if d_state is not None and d_state[2] is not None:
            # The open tokens and those of the call are one sequence.
            d_opened = (jnp.moveaxis(d, 2, 1) for d in d_state[2])
            pairs = zip(d_opened, d_tokens[1:], strict=True)
            joined = (jnp.concatenate(pair, axis=1) for pair in pairs)
            d_tokens, d_state = (d_tokens[0], *joined), d_state[:2]
        return values, (d_tokens, d_state, d_empty)

    return jax.jit(pull)(arguments)
