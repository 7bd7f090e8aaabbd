"""Lattice: slots on the unit sphere, each write orthogonal to its slot.

`lattice` validates its arguments, picks an implementation, splits the segment into
chunks and runs it: `checks`, then `segment.in_chunks`, then one of `xla`, `pallas_tpu`
and `pallas_gpu`. `reference` is the definition.
"""

import functools
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, chunks, implementations, partition
from memjax_kernels._src.common.steps.segment import by_tokens
from memjax_kernels._src.lattice import checks, pallas_gpu, pallas_tpu
from memjax_kernels._src.lattice.memory import (
    LatticeForget,
    LatticeState,
    LatticeVariant,
    Rule,
)
from memjax_kernels._src.lattice.reference import step
from memjax_kernels._src.lattice.segment import in_chunks
from memjax_kernels._src.lattice.xla import lattice_xla

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]

# `common.steps.segment` says what a chunk implementation takes and returns.
_CHUNKWISE: dict[str, Callable] = {
    "xla": lattice_xla,
    "pallas_tpu": partition.chunkwise(pallas_tpu.lattice_tpu),
    "pallas_gpu": partition.chunkwise(pallas_gpu.lattice_gpu),
}


def lattice(
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None = None,
    state: LatticeState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    empty: LatticeState | None = None,
    chunk_size: int = 16,
    variant: LatticeVariant = "dec",
    normalize: bool = True,
    forget: LatticeForget | None = None,
    implementation: Implementation | None = None,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """Runs the recurrence of `reference` over a segment.

    Gradients are taken at the memory of the chunk's start, so `chunk_size` is part of
    the function: train and decode with the same. 1 is the recurrence of the paper;
    the difference grows with gamma and with the chunk.

    Args:
        q: queries over the M slots.
        k: keys over the slots.
        v: values.
        gamma: step sizes, at least 0.
        g: log forget gates, at most 0: mu = exp(g) for forget="l2", the soft
            threshold is -g for "l1". Given if and only if `forget` is.
        state: the memory before the segment; None is `empty`.
        reset: where the memory is emptied before a token, which must be the first of
            a chunk. Inside jit, where that cannot be checked, the batch element's
            reads from a misplaced reset on are NaN, and so is its state.
        empty: the memory of a new document: the `start` of this state; None is
            `lattice_init_state` with its defaults.
        chunk_size: C, at least 1; that of `state` and `empty`.
        variant: the objective: "dec" (eq. 6), "enc" (eq. 9) or "sim" (eq. 11).
        normalize: whether slots are put back on the unit sphere (eq. 14). The slots of
            `state` and `empty` must then be of unit norm; this is checked within 1e-3
            where values are known.
        forget: decay of the memory before a write, "l2" (eq. 16), or a soft threshold
            after it, "l1" (eq. 18). "l1" is not linear in the memory that is written,
            so it is defined for chunk_size=1 only.
        implementation: None is the fastest that can run here.

    Returns:
        The memory after the segment, and the read after every token's write.

    Raises:
        ValueError: on shapes that do not fit, known values out of range, an unknown or
            unfit option, a state of another chunk size, or an implementation that
            cannot run here.
    """
    rule = Rule(variant, normalize, forget)
    checks.check_options(rule, chunk_size, g)
    sizes = checks.check_tokens(q, k, v, gamma, g)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    empty = checks.check_states(state, empty, sizes, chunk_size, rule)
    misplaced = chunks.misplaced_resets(reset, chunk_size, state and state.position)
    forms = {name: functools.partial(f, rule=rule) for name, f in _CHUNKWISE.items()}
    form = implementations.choose(
        "lattice",
        implementation,
        {"reference": by_tokens} | forms,
        {
            "pallas_tpu": pallas_tpu.unsupported(q, k, v, chunk_size, rule),
            "pallas_gpu": pallas_gpu.unsupported(q, k, v, chunk_size, rule),
        },
        ("pallas_tpu", "pallas_gpu"),
    )
    tokens, memories = (q, k, v, gamma, g), (state, reset, empty)
    if implementation == "reference":
        one_token = functools.partial(step, rule=rule)
        after, y = by_tokens(one_token, tokens, *memories)
    else:
        after, y = in_chunks(form, *tokens, *memories)
    return chunks.mask_with_nan(after, y, misplaced)
