"""The token loop behind every op whose memory is emptied by zeros."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree


def run(
    step: Callable,
    tokens: tuple[Float[Array, "B T ..."] | None, ...],
    state: PyTree[Float[Array, "B ..."]],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[PyTree[Float[Array, "B ..."]], Float[Array, "B T *_"]]:
    """Calls step(*token, state) -> (state, y) for one token after the other.

    Args:
        step: one token of the op.
        tokens: what it takes of each token; None is handed on.
        state: the memory before the first.
        reset: True puts zeros in a row's memory before that token.
    """

    def body(state, item):
        token, new = item
        if new is not None:
            state = jax.tree.map(lambda s: empty_rows(s, new), state)
        return step(*token, state)

    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, reset))
    state, y = jax.lax.scan(body, state, time_first)
    return state, jnp.moveaxis(y, 0, 1)


def empty_rows(state: Float[Array, "B ..."], rows: Bool[Array, " B"]) -> Array:
    """Zeros where `rows` is True."""
    return jnp.where(rows.reshape(-1, *(1,) * (state.ndim - 1)), 0.0, state)
