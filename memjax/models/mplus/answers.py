"""A prompt's answer from M+: one retrieval, one reading, token after token.

Shapes: B batch, T time, n new tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from memjax.models.mplus.state import MPlusState
from memjax.models.sampling import Sampling, draw


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    graph: Any,
    count: int,
    sampling: Sampling,
    params: Any,
    state: MPlusState,
    prompt: Int[Array, "B T"],
    key: PRNGKeyArray,
) -> Int[Array, "B n"]:
    """See `MPlus.generate`; graph and params are of `nnx.split`."""
    model = nnx.merge(graph, params)
    told = state if model.config.by_attention else None
    reading, logits = model.read(state, prompt, room=count - 1)

    def body(carry, key):
        reading, logits = carry
        token = draw(logits, key, sampling)
        reading, logits = model.read_on(reading, token[:, None], state=told)
        return (reading, logits[:, 0]), token

    *keys, last = jax.random.split(key, count)
    carry = (reading, logits[:, -1])
    tokens = jnp.zeros((0, prompt.shape[0]), jnp.int32)
    if keys:
        carry, tokens = jax.lax.scan(body, carry, jnp.stack(keys))
    token = draw(carry[1], last, sampling)
    return jnp.concatenate([tokens, token[None]]).T
