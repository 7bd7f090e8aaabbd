"""State-space duality (Mamba-2): linear attention with one forget gate a head.

    S ← exp(g) S + k vᵀ        y = Sᵀ q

Dao and Gu (2024), https://arxiv.org/abs/2405.21060, equation 1 with scalar A = exp(g),
B = k, C = q, x = v.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels.common import arguments, implementations
from memjax_kernels.linear_attention.reference import empty_state as empty_state
from memjax_kernels.linear_attention.ssd.reference import ssd_reference
from memjax_kernels.linear_attention.ssd.reference import step as step
from memjax_kernels.linear_attention.ssd.xla import ssd_xla

Implementation = Literal["reference", "xla"]


def ssd(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"] | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Runs the recurrence over T tokens, T at least 1.

    Args:
        q: queries, not scaled here.
        k: keys.
        v: values.
        g: log of the share of the memory that is kept, in [-inf, 0]; inside jit the
            range is the caller's promise.
        state: the memory before the segment, float32; None is empty.
        reset: True empties a row's memory before that token.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, gates out of range, or an
            implementation that is unknown or cannot run here.
    """
    sizes = arguments.check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        g=(g, "B T H"),
        state=(state, "B H K V"),
    )
    arguments.check_float32("state", state)
    arguments.check_range("g", g, -float("inf"), 0.0)
    arguments.check_reset(reset, sizes["B"], sizes["T"])
    if state is None:
        state = empty_state(*(sizes[letter] for letter in "BHKV"))
    forms = {"xla": ssd_xla, "reference": ssd_reference}
    form = implementations.choose("ssd", implementation, forms)
    return form(q, k, v, g, state, reset)
