"""Delta-rule recurrence over a segment."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels.delta_rule.reference import delta_rule_reference
from memjax_kernels.delta_rule.xla import delta_rule_xla

Implementation = Literal["reference", "xla"]


def delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Runs the recurrence that `delta_rule_reference` defines.

    Args:
        q: queries.
        k: keys, of unit norm.
        v: values.
        beta: write rates, in [0, 1].
        state: the memory before the segment, float32; None is empty.
        implementation: which code runs; None is the fastest, "xla".

    Returns:
        The memory after the segment, and the read at every position.

    Raises:
        ValueError: on an unknown implementation.
    """
    if state is None:
        b, _, h, width = k.shape
        state = jnp.zeros((b, h, width, v.shape[-1]), jnp.float32)
    match implementation:
        case None | "xla":
            return delta_rule_xla(q, k, v, beta, state)
        case "reference":
            return delta_rule_reference(q, k, v, beta, state)
    raise ValueError(
        f"implementation must be None or one of {get_args(Implementation)}, "
        f"got {implementation!r}"
    )
