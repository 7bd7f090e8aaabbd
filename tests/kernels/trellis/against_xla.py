"""The TPU kernels of Trellis against the XLA form: inputs, results, gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax_kernels import TrellisState, trellis_init_state
from memjax_kernels._src.trellis import segment
from memjax_kernels._src.trellis.pallas_tpu import trellis_tpu
from memjax_kernels._src.trellis.state import Rule, TrellisTokens
from tests.kernels.on_tpu import INTERPRETER

INTERPRETED = functools.partial(trellis_tpu, interpret=INTERPRETER)
PLAIN = Rule()
# Faster, for what does not depend on when memory is written.
PLAINLY_INTERPRETED = functools.partial(trellis_tpu, interpret=True)


def draw(
    batch, time, heads, key, value, slots, dtype=jnp.float32, gates=(2,), seed=0
) -> Any:
    draws = np.random.default_rng(seed)

    def normal(*width):
        return draws.standard_normal((batch, time, heads, *width), np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    tokens = unit(normal(key)), unit(normal(key)), normal(value), 0.3 * normal(slots)
    gamma, g = (1 / (1 + np.exp(-normal(*gates) - shift)) for shift in (0, 1))
    tokens = (jnp.asarray(x, dtype) for x in tokens)
    return *tokens, jnp.asarray(gamma), jnp.asarray(np.log(g))


def in_chunks(implementation, tokens, state, empty, reset=None, **options):
    given: Any = (*tokens, state, reset, empty)
    form = functools.partial(implementation, rule=Rule(**options))
    return segment.in_chunks(form, *given)


def perturbed(state, seed):
    """Other memories."""
    draws = np.random.default_rng(seed)

    def near(x):
        return jnp.asarray(x + 0.3 * draws.standard_normal(x.shape, np.float32))

    keys, values = near(np.asarray(state.keys)), near(np.asarray(state.values))
    return dataclasses.replace(state, keys=keys, values=values)


def opened(state, tokens, place) -> TrellisState:
    """A state whose batch elements have the first `place` of tokens [B, C, H, ...]."""
    place = np.asarray(place, np.int32)
    here = np.arange(state.chunk_size)[None] < place[:, None]

    def token(x):
        x = np.moveaxis(np.asarray(x, np.float32), 2, 1)
        return x * here.reshape(-1, 1, here.shape[1], *[1] * (x.ndim - 3))

    k, v, alpha, gamma, g = (token(x) for x in tokens[1:])
    gates = gamma[..., 0], gamma[..., 1], g[..., 0], g[..., 1]
    found = TrellisTokens(*map(jnp.asarray, (k, v, alpha, *gates)))
    return dataclasses.replace(state, tokens=found, position=jnp.asarray(place))


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
    return opened(state, draw(b, c, h, k, v, m), place)


@functools.partial(jax.jit, static_argnums=(0, 3))
def both(implementation, arguments, reset=None, rule=PLAIN):
    """Results, and gradients of everything for random cotangents."""
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
        given = tokens, before, fresh, reset
        after, y = in_chunks(implementation, *given, **rule._asdict())
        return floats(after), y

    values, back = jax.vjp(forward, tokens, floats(state), floats(empty))
    draws = np.random.default_rng(7)
    d_tokens, d_state, d_empty = back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )
    if d_state is not None and d_state[2] is not None:
        # The open tokens and those of the call are one sequence.
        d_opened = (jnp.moveaxis(d, 2, 1) for d in d_state[2])
        pairs = zip(d_opened, d_tokens[1:], strict=True)
        joined = (jnp.concatenate(pair, axis=1) for pair in pairs)
        d_tokens, d_state = (d_tokens[0], *joined), d_state[:2]
    return values, (d_tokens, d_state, d_empty)
