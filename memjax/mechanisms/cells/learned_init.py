"""Memories that start from learned parameters.

An empty state knows no parameters. It holds zeros until the first call, which replaces
them by the learned initial memory.

Shapes: B batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from memjax.mechanisms.base import replace_rows
from memjax_kernels._src.common.steps.in_place import change_if


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


def initialise_in_place(state: LearnedInit, initial: PyTree) -> PyTree:
    """`initialise` for a step, which passes over the memory only where it must.

    `initial` may have one batch element, for all.
    """
    mask = state.uninitialised
    return change_if(replace_rows, jnp.any(mask), state.memory, initial, mask)


def for_batch(params: PyTree, batch: int) -> PyTree:
    """Learned arrays, repeated for every batch element, in float32.

    Parameters may have another dtype; memories do not.
    """

    def repeated(leaf):
        return jnp.repeat(leaf[None].astype(jnp.float32), batch, axis=0)

    return jax.tree.map(repeated, params)
