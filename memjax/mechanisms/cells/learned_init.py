"""Memories that start from learned parameters.

An empty state knows no parameters. It holds zeros until the first call, which replaces
them by the learned initial memory.

Shapes: B batch, H heads, V value.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from memjax.mechanisms.base import replace_rows
from memjax_kernels._src.common import one_pass


class LearnedInit(NamedTuple):
    """A memory, and the batch elements whose memory is not initialised yet."""

    memory: PyTree
    uninitialised: Bool[Array, " B"]


def uninitialised(batch: int, memory: PyTree) -> LearnedInit:
    """The empty state: zeros of the types of `memory`."""
    # Each leaf its own buffer, so that a state can be donated.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    return LearnedInit(zeros, jnp.ones(batch, bool))


def initialised(memory: PyTree) -> LearnedInit:
    """The state after a call: every batch element is initialised."""
    batch = jax.tree.leaves(memory)[0].shape[0]
    return LearnedInit(memory, jnp.zeros(batch, bool))


def initialise(state: LearnedInit, initial: PyTree) -> PyTree:
    """The memory, with the learned `initial` one where it is uninitialised."""
    return replace_rows(state.memory, initial, state.uninitialised)


def for_batch(params: PyTree, batch: int) -> PyTree:
    """Learned arrays, repeated for every batch element, in float32.

    Parameters may have another dtype; memories do not.
    """

    def repeated(leaf):
        return jnp.repeat(leaf[None].astype(jnp.float32), batch, axis=0)

    return jax.tree.map(repeated, params)


def initialised_step(
    op_step: Callable,
    tokens: Sequence[Float[Array, "B H ..."] | None],
    state: LearnedInit,
    initial: PyTree,
    **options: Any,
) -> tuple[PyTree, Float[Array, "B H V"]]:
    """`op_step` on the memory of `initialise`, in one pass over the memory.

    Args:
        op_step: (*tokens, memory, **options) -> (memory, y), one token of an op.
        tokens: its arguments before the memory.
        state: the memory before the token.
        initial: the learned memory of one batch element.
        **options: of the step.
    """
    arrays = [leaf for leaf in jax.tree.leaves(initial) if leaf.ndim == 4]

    def with_counts(leaf, new):
        # Counts are replaced here, arrays where the step reads them.
        if leaf.ndim == 4:
            return leaf
        return replace_rows(leaf, new, state.uninitialised)

    memory = jax.tree.map(with_counts, state.memory, initial)
    given = (tokens, state.uninitialised, arrays, memory)
    return _initialise_and_step(*given, op_step=op_step, options=tuple(options.items()))


@one_pass.on_tpu
def _initialise_and_step(tokens, mask, arrays, memory, *, op_step, options):
    """`op_step` on the memory with its arrays replaced where `mask` is True."""
    remaining = iter(arrays)

    def replaced(leaf):
        if leaf.ndim != 4:
            return leaf
        return jnp.where(mask[:, None, None, None], next(remaining), leaf)

    memory = jax.tree.map(replaced, memory)
    return inspect.unwrap(op_step)(*tokens, memory, **dict(options))
