"""The reference loop of ops with an empty memory of zeros: one token at a time."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from memjax_kernels._src.common import chunks


def scan_tokens(
    step: Callable,
    tokens: tuple[Shaped[Array, "B T ..."] | None, ...],
    state: PyTree[Shaped[Array, "B ..."]],
    reset: Bool[Array, "B T"] | None = None,
    remat_every: int | None = None,
) -> tuple[PyTree[Shaped[Array, "B ..."]], Float[Array, "B T *_"]]:
    """Calls step(*token, state) -> (state, y) for every token in order.

    Args:
        step: one token of the op; `one_pass` is taken off it.
        tokens: its arrays of all tokens; None stays None.
        state: the memory before the first.
        reset: True fills the memory of a batch element with zeros before that token.
        remat_every: tokens between two memories that are saved for the backward pass;
            None saves what each token's gradient needs.
    """

    # The reference is the step in plain jax, on any platform.
    step = inspect.unwrap(step)

    def reset_and_step(state, item):
        token, is_reset = item
        # The reset comes before the token, which is the first of its document.
        if is_reset is not None:
            state = jax.tree.map(lambda x: chunks.where(is_reset, 0.0, x), state)
        return step(*token, state)

    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, reset))
    scan = jax.lax.scan
    if remat_every is not None:
        scan = functools.partial(chunks.scan, remat_every=remat_every)
    state, y = scan(reset_and_step, state, time_first)
    return state, jnp.moveaxis(y, 0, 1)
