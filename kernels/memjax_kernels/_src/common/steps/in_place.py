"""Conditional change of a state, without a copy when it is not made."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def change_if(
    change: Callable[..., PyTree], needed: Bool[Array, ""], state: PyTree, *given: Any
) -> PyTree:
    """`change(state, *given)` where needed, else the state.

    A loop of one turn or none: what a loop carries stays in its buffers, where a
    conditional copies what a branch passes on. Derivatives are those of a conditional,
    since a loop of unknown length has no transpose.

    Args:
        change: pure, and closes over no array; its result is like the state.
        needed: whether to change.
        state: arrays.
        given: other arguments of `change`, arrays.
    """

    def once(carried):
        return (jnp.zeros_like(needed), change(carried[1], *given))

    return jax.lax.while_loop(lambda carried: carried[0], once, (needed, state))[1]


@change_if.defjvp
def _change_if_jvp(change, primals, tangents):
    def by_branches(needed, state, *given):
        def passed_on(state, *given):
            return state

        return jax.lax.cond(needed, change, passed_on, state, *given)

    return jax.jvp(by_branches, primals, tangents)
