"""Trellis: two memories of M slots, trained online, token by token.

`trellis` validates its arguments, picks an implementation, splits the segment into
chunks and runs it: `checks`, then `segment.in_chunks`, then one of `xla`, `pallas_tpu`
and `pallas_gpu`. `reference` is the definition.
"""

import functools
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import (
    arguments,
    chunks,
    implementations,
    mosaic,
    partition,
)
from memjax_kernels._src.common.steps.segment import by_tokens, check_states
from memjax_kernels._src.trellis import checks, pallas_gpu, pallas_tpu, segment
from memjax_kernels._src.trellis.functions import TrellisActivation, TrellisPhi
from memjax_kernels._src.trellis.reference import step
from memjax_kernels._src.trellis.state import Rule, TrellisState
from memjax_kernels._src.trellis.xla import trellis_xla

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
# `common.steps.segment` says what a chunk implementation takes and returns.
_CHUNKWISE: dict[str, Callable] = {
    "xla": trellis_xla,
    "pallas_tpu": partition.chunkwise(pallas_tpu.trellis_tpu),
    "pallas_gpu": partition.chunkwise(pallas_gpu.trellis_gpu),
}


def trellis(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    gamma: Float[Array, "B T H ..."],
    g: Float[Array, "B T H ..."] | None = None,
    state: TrellisState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    empty: TrellisState | None = None,
    chunk_size: int = 64,
    phi: TrellisPhi = "l2_silu",
    activation: TrellisActivation = "ln_silu",
    bound_steps: bool = False,
    normalize: bool = False,
    implementation: Implementation | None = None,
) -> tuple[TrellisState, Float[Array, "B T H V"]]:
    """Both passes over a segment: a loop of `trellis_step`.

    Keys are compressed into M slots, and values into M slots. A query reads the key
    memory; the result, through an activation, reads the value memory. Karami et
    al., "Trellis", eqs. 8-14; the factor 2 of eq. 9 is absorbed in gamma.

    Gradients inside the memory are taken at its value at the start of a chunk of
    `chunk_size` tokens, which is therefore part of the function: 1 is the fully
    non-linear recurrence. Neither q nor k is scaled or normalised here. With chunks of
    one token and keys of 0 or of 1e6, gradients are off by up to 1e-4 of their scale;
    another rounding of the inputs to float32 changes them by more.

    Args:
        q: queries.
        k: keys.
        v: values.
        alpha: targets of both passes.
        gamma: step sizes >= 0, [B, T, H] for both passes or [B, T, H, 2] for each.
        g: log forget gates <= 0, likewise; None forgets nothing, -inf forgets all.
        state: the memory before the segment; None is `empty`, and the cheaper.
        reset: True where a batch element's memory is emptied before the token, which
            must be the first of a chunk. Inside jit, where that cannot be checked, the
            element's reads from a misplaced reset on are NaN, and so is its state.
        empty: the memory after a reset, at position 0; None is `trellis_init_state`.
        chunk_size: C, at least 1.
        phi: applied to predictions before they are compared with alpha.
        activation: f between the passes.
        bound_steps: whether gamma, in [0, 1], is multiplied by Π (1 - gamma_s ⟨k_s,
            k_t⟩²) over the tokens s before t in its chunk, in the second pass of
            values: a key that repeats is written once. They must have unit norm or be
            zeros, which is not checked. The state keeps the steps as given.
        normalize: whether v is divided by its norm, before steps are bounded, and alpha
            by its root mean square, with 1e-6 added to the sums of squares. The state
            keeps what was divided.
        implementation: None is the fastest that can run here.

    Returns:
        The memory after the segment, and the read at every position in v's dtype.

    Raises:
        ValueError: on shapes that do not fit, an unknown option, gates outside their
            range, a misplaced reset or a position outside its chunk (where values are
            known), a state of another type, shape, dtype or chunk size, or an
            implementation that cannot run here.
    """
    checks.check_options(chunk_size, phi, activation)
    sizes = checks.check_tokens(q, k, v, alpha, gamma, g)
    default = checks.default(sizes, chunk_size)
    blank: TrellisState = check_states(state, empty, default)
    if bound_steps:
        arguments.check_range("gamma", gamma, 0.0, 1.0)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    misplaced = chunks.misplaced_resets(reset, chunk_size, state and state.position)
    rule = Rule(phi, activation, bound_steps, normalize)
    forms = {name: functools.partial(f, rule=rule) for name, f in _CHUNKWISE.items()}
    form = implementations.choose(
        "trellis",
        implementation,
        {"reference": by_tokens} | forms,
        {
            "pallas_tpu": pallas_tpu.unsupported(q, k, v, alpha, chunk_size),
            "pallas_gpu": mosaic.unsupported(chunk_size, q=q, k=k, v=v, alpha=alpha),
        },
        ("pallas_tpu", "pallas_gpu"),
    )
    tokens, memories = (q, k, v, alpha, gamma, g), (state, reset, blank)
    if implementation == "reference":
        one_token = functools.partial(step, rule=rule)
        after, y = by_tokens(one_token, tokens, *memories)
    else:
        after, y = segment.in_chunks(form, *tokens, *memories, normalize)
    # Results after a misplaced reset have no meaning, and must not pass unseen.
    return chunks.mask_with_nan(after, y, misplaced)
