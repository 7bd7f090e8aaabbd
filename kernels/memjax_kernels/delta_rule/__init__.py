"""Delta-rule recurrence over a segment."""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels.common.arguments import (
    check_float32,
    check_range,
    check_reset,
    check_shapes,
)
from memjax_kernels.common.implementations import choose
from memjax_kernels.delta_rule.reference import delta_rule_reference
from memjax_kernels.delta_rule.reference import step as step
from memjax_kernels.delta_rule.xla import delta_rule_xla
from memjax_kernels.linear_attention.reference import empty_state as empty_state

Implementation = Literal["reference", "xla"]


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"] | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ, and y_t = S_tᵀ q_t.

    Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, eq. 24.

    Args:
        q: queries, taken as they are: the scale is the caller's.
        k: keys, taken as they are. Stable for β |k|² <= 2: unit keys are the caller's.
        v: values.
        beta: write rates, in [0, 1].
        state: the memory before the segment, float32; None is empty.
        reset: tokens before which a row's memory is emptied; None is none.
        implementation: which code runs; None is the fastest that runs here.

    Returns:
        The memory after the segment, in float32, and the read at every position, in
        the dtype of `v`.

    Raises:
        ValueError: on arguments that do not fit each other, a rate outside [0, 1]
            where its value is known, or an implementation that cannot run.
    """
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        beta=(beta, "B T H"),
        state=(state, "B H K V"),
    )
    check_range("beta", beta, 0.0, 1.0)
    check_reset(reset, sizes["B"], sizes["T"])
    check_float32("state", state)
    if state is None:
        state = empty_state(*(sizes[letter] for letter in "BHKV"))
    forms = {
        "xla": lambda q, k, v, beta, *rest: delta_rule_xla(q, k, v, beta, None, *rest),
        "reference": delta_rule_reference,
    }
    form = choose("delta_rule", implementation, forms)
    return form(q, k, v, beta, state, reset)
