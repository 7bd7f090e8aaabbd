"""Lattice: slots on the unit sphere, written by what is new to each of them."""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import chunks, implementations, partition
from memjax_kernels.common.arguments import (
    check_choice,
    check_range,
    check_reset,
    check_shapes,
)
from memjax_kernels.lattice import aligned, pallas_gpu, pallas_tpu
from memjax_kernels.lattice.memory import VARIANTS as VARIANTS
from memjax_kernels.lattice.memory import Forget as Forget
from memjax_kernels.lattice.memory import LatticeState as LatticeState
from memjax_kernels.lattice.memory import Rule as Rule
from memjax_kernels.lattice.memory import Variant as Variant
from memjax_kernels.lattice.memory import beginning as beginning
from memjax_kernels.lattice.memory import empty_state as empty_state
from memjax_kernels.lattice.reference import lattice_reference
from memjax_kernels.lattice.reference import step as step
from memjax_kernels.lattice.xla import lattice_xla, lattice_xla_head

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]

# Forms of `aligned`.
_FORMS: dict[str, Callable] = {
    "xla": lattice_xla,
    "pallas_tpu": partition.chunkwise(pallas_tpu.lattice_tpu),
    "pallas_gpu": partition.chunkwise(pallas_gpu.lattice_gpu),
}


def lattice(
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    state: LatticeState | None = None,
    *,
    g: Float[Array, "B T H"] | None = None,
    variant: Variant = "dec",
    chunk_size: int = 16,
    normalize: bool = True,
    forget: Forget | None = None,
    reset: Bool[Array, "B T"] | None = None,
    empty: LatticeState | None = None,
    implementation: Implementation | None = None,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """Runs the recurrence that `lattice.reference` defines.

    Gradients are taken at the memory of the chunk's start, so `chunk_size` is part of
    the function: train and decode with the same. 1 is the recurrence of the paper;
    the difference grows with gamma and with the chunk.

    Args:
        q: queries over the M slots.
        k: keys over the slots.
        v: values.
        gamma: step sizes, at least 0.
        state: the memory before the segment; None is `empty`.
        g: log forget gates, at most 0: mu = exp(g) for forget="l2", the soft
            threshold is -g for "l1". Given if and only if `forget` is.
        variant: the objective: "dec" (eq. 6), "enc" (eq. 9) or "sim" (eq. 11).
        chunk_size: C, at least 1; that of `state` and `empty`.
        normalize: whether slots are put back on the unit sphere (eq. 14). The slots of
            `state` and `empty` must then be of unit norm; this is checked within 1e-3
            where values are known.
        forget: decay of the memory before a write, "l2" (eq. 16), or a soft threshold
            after it, "l1" (eq. 18). "l1" is not linear in the memory that is written,
            so it is defined for chunk_size=1 only.
        reset: where the memory is emptied before a token. It must be where the row
            starts a chunk; elsewhere the row's outputs from there on and its state
            become NaN, or ValueError is raised where values are known.
        empty: the memory of a new document: the `start` of this state; None is
            `empty_state` with its defaults.
        implementation: which code runs; None is the fastest that runs here.

    Returns:
        The memory after the segment, and the read after every token's write.

    Raises:
        ValueError: on shapes that do not fit, known values out of range, an unknown or
            unfit option, a state of another chunk size, or an implementation that
            cannot run here.
    """
    rule = Rule(variant, normalize, forget)
    _check_options(rule, chunk_size, g)
    sizes = _check_tokens(q, k, v, gamma, g, reset)
    in_phase = chunk_size == 1 or state is None
    state, empty = _memories(state, empty, chunk_size, rule, sizes)
    wrong = None
    if reset is not None:
        position = None if in_phase else state.position
        wrong = chunks.misplaced_resets(reset, chunk_size, position)
    unsupported = {
        "pallas_tpu": pallas_tpu.unsupported(q, k, v, chunk_size, rule),
        "pallas_gpu": pallas_gpu.unsupported(q, k, v, chunk_size, rule),
    }
    forms = _FORMS | {"reference": lattice_reference}
    form = implementations.choose("lattice", implementation, forms, unsupported)
    arguments = (q, k, v, gamma, g, state, reset, empty.start, rule)
    if implementation == "reference":
        state, y = lattice_reference(*arguments)
    else:
        head = lattice_xla_head
        state, y = aligned.run(form, head, *arguments, in_phase=in_phase)
    return chunks.mask_with_nan(state, y, wrong)


def _check_options(rule, chunk_size, g):
    check_choice("variant", rule.variant, VARIANTS)
    check_choice("forget", rule.forget, (None, "l2", "l1"))
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if (g is None) != (rule.forget is None):
        given = "None" if g is None else "an array"
        raise ValueError(
            f"g must be given if and only if forget is, got g={given} and "
            f"forget={rule.forget!r}"
        )
    if rule.forget == "l1" and chunk_size > 1:
        raise ValueError(
            "forget='l1' is a soft threshold after every token, which is defined for "
            f"chunk_size=1 only, got chunk_size={chunk_size}"
        )


def _check_tokens(q, k, v, gamma, g, reset):
    sizes = check_shapes(
        q=(q, "B T H M"),
        k=(k, "B T H M"),
        v=(v, "B T H V"),
        gamma=(gamma, "B T H"),
        g=(g, "B T H"),
    )
    check_range("gamma", gamma, 0.0, float(np.finfo(np.float32).max))
    check_range("g", g, -np.inf, 0.0)
    check_reset(reset, sizes["B"], sizes["T"])
    return sizes


def _memories(state, empty, chunk_size, rule, sizes):
    """The memory to start from and the empty one, checked."""
    b, h, m, v = (sizes[letter] for letter in "BHMV")
    for name, given in (("state", state), ("empty", empty)):
        if given is None:
            continue
        if given.chunk_size != chunk_size:
            raise ValueError(
                f"{name} must be of chunk_size={chunk_size}, got one of chunk_size="
                f"{given.chunk_size}: the chunk is part of the function"
            )
        wanted = {
            "start": (b, h, m, v),
            "pending": (b, h, m, v),
            "decay": (b, h),
            "position": (b,),
        }
        for field, shape in wanted.items():
            array = getattr(given, field)
            dtype = jnp.int32 if field == "position" else jnp.float32
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name}.{field} must be {jnp.dtype(dtype)}{list(shape)}, got "
                    f"{array.dtype}{list(array.shape)}"
                )
        # What is empty is at a chunk's start.
        last = chunk_size - 1.0 if name == "state" else 0.0
        check_range(f"{name}.position", given.position, 0.0, last)
        if rule.normalize and not isinstance(given.start, Tracer):
            norms = np.linalg.norm(np.asarray(given.start), axis=-1)
            # A slot that a soft threshold emptied has norm 0.
            if np.any((norms != 0) & ~(np.abs(norms - 1) <= 1e-3)):
                raise ValueError(
                    f"{name}.start must hold slots of unit norm where normalize=True, "
                    f"got norms from {norms.min()} to {norms.max()}"
                )
    if empty is None:
        empty = empty_state(b, h, m, v, chunk_size)
    return (beginning(empty.start, chunk_size) if state is None else state), empty
