"""A step of the sequences at some slots of a pool of states, for serving."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, PyTree

from memjax_kernels._src.common import implementations, partition
from memjax_kernels._src.common.arguments import check_step, token_axes
from memjax_kernels._src.common.steps import one_pass


def step_at_slots(
    step: Callable[..., tuple[PyTree, Array]],
    slots: Int[Array, " B"],
    *given: Any,
    **options: Any,
) -> tuple[PyTree, Array]:
    """One token of each of B sequences, whose states are at `slots` of a pool.

    Lowered for a TPU, the step of a linear op runs in one kernel that reads and writes
    these slots alone, where the pool is donated; other steps gather and scatter.

    Args:
        step: of an op, such as `gated_delta_rule_step`.
        slots: the state of each sequence, in [0, S), each at most once.
        given: the step's tokens [B, ...], then the pool: its state with S for B.
        options: the step's own.

    Returns:
        The pool after the token, and the reads [B, H, V]. Inside jit, where slots are
        not known, a sequence whose slot is out of range or another's too reads NaN and
        leaves the pool as it is.

    Raises:
        ValueError: on slots that are no vector of integers, are out of range or come
            twice where they are known, and on what the step refuses.
    """
    *tokens, pool = given
    leaves = jax.tree.leaves(pool)
    if not leaves or not all(getattr(x, "ndim", 0) for x in leaves):
        raise ValueError(f"the last argument must be a pool of states, got {pool!r}")
    batch = _check(slots, leaves[0].shape[0])

    def gathered(slots, *given):
        return _gathered(step, options, slots, *given)

    forms: Any = {"xla": gathered}
    reason = "the step has no kernel that reads slots"
    kernel = one_pass.at_slots(step)
    if kernel is not None:
        states = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), pool
        )
        # Where forms are chosen, values are not known any more.
        check_step(token_axes(inspect.unwrap(step)), (*tokens, states))
        reason = one_pass.unsupported(*tokens, pool)
        if not partition.mesh_of(*given).empty:
            reason = "slots of a pool are not divided by a mesh"

        def in_place(slots, *given):
            # A branch, so that the kernel reads no slot that is not there.
            return jax.lax.cond(
                jnp.all(_valid(slots, leaves[0].shape[0])),
                lambda *x: kernel(options, *x),
                gathered,
                slots,
                *given,
            )

        forms["pallas_tpu"] = in_place
    form = implementations.choose("step_at_slots", None, forms, {"pallas_tpu": reason})
    return form(jnp.asarray(slots, jnp.int32), *tokens, pool)


def _gathered(step, options, slots, *given):
    *tokens, pool = given
    valid = _valid(slots, jax.tree.leaves(pool)[0].shape[0])
    at = jnp.where(valid, slots, 0)
    state, y = step(*tokens, jax.tree.map(lambda x: x[at], pool), **options)

    # What is out of range is dropped.
    def put(x, new):
        return x.at[jnp.where(valid, slots, x.shape[0])].set(new, mode="drop")

    return jax.tree.map(put, pool, state), jnp.where(valid[:, None, None], y, jnp.nan)


def _valid(slots: Int[Array, " B"], number: int) -> Bool[Array, " B"]:
    """Whether a slot is there, and no other sequence's."""
    alone = (slots[:, None] == slots[None]).sum(1) == 1
    return alone & (slots >= 0) & (slots < number)


def _check(slots: Any, number: int) -> int:
    """The number of sequences."""
    dtype, shape = getattr(slots, "dtype", None), getattr(slots, "shape", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or len(shape or ()) != 1:
        kind = f"{dtype}{list(shape)}" if shape is not None else repr(slots)
        raise ValueError(f"slots must be integers [B], got {kind}")
    if isinstance(slots, Tracer):
        return slots.shape[0]
    known = np.asarray(slots)
    if known.size and (known.min() < 0 or known.max() >= number):
        raise ValueError(f"slots must lie in [0, {number - 1}], got {known.tolist()}")
    if len(np.unique(known)) < len(known):
        raise ValueError(f"slots must each come at most once, got {known.tolist()}")
    return len(known)
