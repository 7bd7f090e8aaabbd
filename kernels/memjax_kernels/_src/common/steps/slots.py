"""A step of the sequences at some slots of a pool of states, for serving."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Integer, PyTree

from memjax_kernels._src.common import implementations, partition
from memjax_kernels._src.common.arguments import check_step, token_axes
from memjax_kernels._src.common.steps import one_pass


def step_at_slots(
    step: Callable[..., tuple[PyTree, Array]],
    slots: Integer[Array, " B"],
    *given: Any,
    **options: Any,
) -> tuple[PyTree, Array]:
    """One token of each of B sequences, whose states are at `slots` of a pool.

    Lowered for a TPU, the step of a linear op or of gated slots runs in one kernel that
    reads and writes these slots alone, without a copy of a donated pool. Other steps
    gather and scatter, as do all on a mesh, and functions made of a step.

    Args:
        step: of an op, such as `gated_delta_rule_step`.
        slots: the state of each sequence, in [0, S), each at most once.
        given: the step's tokens [B, ...], then the pool: its state with S for B.
        options: the step's own.

    Returns:
        The pool after the token, and the reads [B, ...]. Inside jit, where slots are
        not known, the read of a sequence whose slot is out of range, or another's too,
        is NaN, and nothing is written for it.

    Raises:
        ValueError: on slots that are no vector of integers, are out of range or come
            twice where they are known, on a pool whose arrays are not float32 or differ
            in S, and on what the step refuses.
    """
    *tokens, pool = given if given else (None,)
    axes = token_axes(inspect.unwrap(step))
    if axes and len(given) != len(axes):
        raise ValueError(
            f"given must be {', '.join(axes)} of the step, got {len(given)} arguments"
        )
    number, batch = _check_pool(pool), _check(slots)
    _check_values(slots, number)
    tokens, pool = jax.tree.map(jnp.asarray, (tokens, pool))
    # Before a cast, which may wrap.
    slots = jnp.where(_valid(jnp.asarray(slots), number), slots, -1).astype(jnp.int32)

    def by_xla(slots, *given):
        plain = functools.partial(step, **options)
        return one_pass.gathered(plain, *given, slots)

    forms: Any = {"xla": by_xla}
    reason = "the step has no kernel that reads slots"
    kernel = one_pass.at_slots(step)
    if kernel is not None:
        states = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), pool
        )
        # Where forms are chosen, values are not known any more.
        check_step(axes, (*tokens, states))
        reason = one_pass.unsupported(*tokens, pool)
        if partition.divides(*tokens, pool):
            reason = "slots of a pool are not divided by a mesh"

        def in_place(slots, *given):
            # A branch, so that the kernel reads no slot that is not there.
            return jax.lax.cond(
                jnp.all(slots >= 0),
                lambda *x: kernel(options, *x),
                by_xla,
                slots,
                *given,
            )

        forms["pallas_tpu"] = in_place
    form = implementations.choose("step_at_slots", None, forms, {"pallas_tpu": reason})
    return form(slots, *tokens, pool)


def _valid(slots: Integer[Array, " B"], number: int) -> Bool[Array, " B"]:
    """True for each slot in [0, number) that is unique."""
    alone = (slots[:, None] == slots[None]).sum(1) == 1
    return alone & (slots >= 0) & (slots < number)


def _check_pool(pool: PyTree) -> int:
    """The number of slots."""
    leaves = jax.tree.leaves(pool)
    if not leaves or not all(getattr(x, "ndim", 0) for x in leaves):
        raise ValueError(f"the last argument must be a pool of states, got {pool!r}")
    numbers = {x.shape[0] for x in leaves}
    if len(numbers) > 1:
        raise ValueError(f"arrays of a pool must have one S, got {sorted(numbers)}")
    floats = {x.dtype.name for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}
    if floats - {"float32"}:
        raise ValueError(f"a pool must be float32, got {sorted(floats)}")
    return numbers.pop()


def _check(slots: Any) -> int:
    """The number of sequences."""
    dtype, shape = getattr(slots, "dtype", None), getattr(slots, "shape", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or len(shape or ()) != 1:
        kind = f"{dtype}{list(shape)}" if shape is not None else repr(slots)
        raise ValueError(f"slots must be integers [B], got {kind}")
    return slots.shape[0]


def _check_values(slots: Any, number: int) -> None:
    if isinstance(slots, Tracer):
        return
    known = np.asarray(slots)
    if known.size and (known.min() < 0 or known.max() >= number):
        raise ValueError(f"slots must lie in [0, {number - 1}], got {known.tolist()}")
    if len(np.unique(known)) < len(known):
        raise ValueError(f"slots must each come at most once, got {known.tolist()}")
