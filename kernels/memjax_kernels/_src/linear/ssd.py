"""State-space duality (Mamba-2): linear attention with one forget gate a head.

    S ← exp(g) S + k vᵀ        y = Sᵀ q

Dao and Gu (2024), https://arxiv.org/abs/2405.21060, equation 1 with scalar A = exp(g),
B = k, C = q, x = v.
"""

import inspect
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, implementations, one_pass
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.linear import chunks, pallas_tpu
from memjax_kernels._src.linear import (
    linear_attention_init_state as linear_attention_init_state,
)
from memjax_kernels._src.linear import linear_attention_step as _add_and_read

add_and_read = inspect.unwrap(_add_and_read)

Implementation = Literal["reference", "xla", "pallas_tpu"]

CHUNK_SIZE = 64


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
        g: log of the share of the memory that is kept, in [-inf, 0];
            inside jit the range is the caller's promise.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
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
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    if state is None:
        state = linear_attention_init_state(*(sizes[letter] for letter in "BHKV"))
    form = implementations.choose(
        "ssd",
        implementation,
        {
            "xla": ssd_xla,
            "reference": ssd_reference,
            "pallas_tpu": pallas_tpu.recur_tpu,
        },
        {"pallas_tpu": recurrence.unsupported(q, k, v)},
        looped=state,
    )
    return form(q, k, v, g, state, reset)


@one_pass.on_tpu
def ssd_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← exp(g) S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    kept = jnp.exp(g.astype(jnp.float32))[..., None, None] * state
    return add_and_read(q, k, v, kept)


def ssd_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """A loop of steps; a reset empties the memory before its token."""
    return scan_tokens(ssd_step, (q, k, v, g), state, reset)


def ssd_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `ssd_reference` in chunks of matrix products."""
    # One gate for all channels: the decays of a chunk form a matrix.
    tokens = (q, k, v, g[..., None])
    return chunks.scan_groups(chunks.linear_group, tokens, state, reset, chunk_size)
