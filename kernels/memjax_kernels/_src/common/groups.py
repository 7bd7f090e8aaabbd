"""Value heads that share a key head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def by_groups(form: Callable[..., Any], ways: int) -> Callable[..., Any]:
    """The form of (q, k, *tokens, state, reset) for `ways` value heads a key head.

    Value head h reads key head h // ways. Queries and keys are not copied, and products
    of them alone are computed once for a key head.
    """
    if ways == 1:
        return form

    def split(axis):
        return lambda x: x.reshape(*x.shape[:axis], -1, ways, *x.shape[axis + 1 :])

    def grouped(q, k, *given):
        *tokens, state, reset = given
        tokens = [x if x is None else split(2)(x) for x in tokens]
        state = jax.tree.map(split(1), state)
        run = jax.vmap(
            lambda tokens, state: form(q, k, *tokens, state, reset),
            in_axes=([None if x is None else 3 for x in tokens], 2),
            out_axes=(2, 3),
        )
        state, y = run(tokens, state)
        state = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), state)
        return state, y.reshape(*y.shape[:2], -1, *y.shape[4:])

    return grouped


def by_copies(form: Callable[..., Any], ways: int) -> Callable[..., Any]:
    """`by_groups` with a copy of each key head for every value head.

    For gates of key channels, which leave no product of queries and keys alone. (With
    another axis its gradient ends in a fault of XLA's on a CPU.)
    """
    if ways == 1:
        return form

    def copied(q, k, *given):
        return form(*(jnp.repeat(x, ways, axis=2) for x in (q, k)), *given)

    return copied
