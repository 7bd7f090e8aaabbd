"""Linear attention: a memory that adds up outer products.

    S ← S + k vᵀ        y = Sᵀ q

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, equations 16 to 20, with
feature maps and normalisation left to the layer.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels.common import arguments, implementations
from memjax_kernels.linear_attention.reference import empty_state as empty_state
from memjax_kernels.linear_attention.reference import linear_attention_reference
from memjax_kernels.linear_attention.reference import step as step
from memjax_kernels.linear_attention.ssd.xla import ssd_xla

Implementation = Literal["reference", "xla"]


def linear_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
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
        state: the memory before the segment, float32; None is empty.
        reset: True empties a row's memory before that token.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, or an implementation that is
            unknown or cannot run here.
    """
    sizes = arguments.check_shapes(
        q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T H V"), state=(state, "B H K V")
    )
    arguments.check_float32("state", state)
    arguments.check_reset(reset, sizes["B"], sizes["T"])
    if state is None:
        state = empty_state(*(sizes[letter] for letter in "BHKV"))
    forms = {
        "xla": lambda q, k, v, *rest: ssd_xla(q, k, v, None, *rest),
        "reference": linear_attention_reference,
    }
    form = implementations.choose("linear_attention", implementation, forms)
    return form(q, k, v, state, reset)
