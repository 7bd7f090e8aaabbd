"""The delta rule: a write replaces what the memory holds for its key.

    S ← S + β k (v - Sᵀk)ᵀ        y = Sᵀ q

Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, equation 24.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, implementations, one_pass
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.delta_rule import pallas_tpu
from memjax_kernels._src.linear import (
    linear_attention_init_state as linear_attention_init_state,
)
from memjax_kernels._src.linear.delta_chunks import scan_chunks

Implementation = Literal["reference", "xla", "pallas_tpu"]


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
    """Runs the recurrence over T tokens, T at least 1.

    Args:
        q: queries, not scaled here.
        k: keys, not normalised here; stable for β |k|² <= 2.
        v: values.
        beta: write rates, in [0, 1].
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a rate outside [0, 1]
            where its value is known, or an implementation that cannot run.
    """
    sizes = arguments.check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        beta=(beta, "B T H"),
        state=(state, "B H K V"),
    )
    arguments.check_range("beta", beta, 0.0, 1.0)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    arguments.check_float32("state", state)
    if state is None:
        state = linear_attention_init_state(*(sizes[letter] for letter in "BHKV"))
    form = implementations.choose(
        "delta_rule",
        implementation,
        {
            "xla": delta_rule_xla,
            "reference": delta_rule_reference,
            "pallas_tpu": delta_rule_tpu,
        },
        {"pallas_tpu": recurrence.unsupported(q, k, v)},
        looped=state,
    )
    return form(q, k, v, beta, state, reset)


@one_pass.on_tpu
def delta_rule_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← S + β k (v - Sᵀk)ᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    q, k, value, beta = (x.astype(jnp.float32) for x in (q, k, v, beta))
    # The prediction is of the memory before the write: what is written is the error.
    error = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + jnp.einsum("bhk,bhv->bhkv", k, error)
    return state, jnp.einsum("bhkv,bhk->bhv", state, q).astype(v.dtype)


def delta_rule_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """A loop of steps; a reset empties the memory before its token."""
    return scan_tokens(delta_rule_step, (q, k, v, beta), state, reset)


def delta_rule_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `delta_rule_reference` in chunks of matrix products."""
    return scan_chunks(q, k, v, beta, None, state, reset)


def delta_rule_tpu(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `delta_rule_reference` in kernels for a TPU."""
    return pallas_tpu.recur_tpu(q, k, v, beta, None, state, reset)
