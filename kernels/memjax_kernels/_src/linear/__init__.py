"""Linear attention: a memory that adds up outer products.

    S ← S + k vᵀ        y = Sᵀ q

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, equations 16 to 20, with
feature maps and normalisation left to the layer.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, implementations, one_pass
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.linear import chunks, pallas_tpu

Implementation = Literal["reference", "xla", "pallas_tpu"]

# Larger chunks are fewer memories, but their matrices grow with the square.
CHUNK_SIZE = 64


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
        reset: True empties the memory of a batch element before that token.
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
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    if state is None:
        state = linear_attention_init_state(*(sizes[letter] for letter in "BHKV"))
    form = implementations.choose(
        "linear_attention",
        implementation,
        {
            "xla": linear_attention_xla,
            "reference": linear_attention_reference,
            "pallas_tpu": linear_attention_tpu,
        },
        {"pallas_tpu": recurrence.unsupported(q, k, v)},
        looped=state,
    )
    return form(q, k, v, state, reset)


def linear_attention_init_state(
    batch: int, heads: int, key_dim: int, value_dim: int
) -> Float[Array, "B H K V"]:
    """The memory before the first token: zeros, float32."""
    return jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)


@one_pass.on_tpu
def linear_attention_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    key, value = k.astype(jnp.float32), v.astype(jnp.float32)
    state = state + key[..., :, None] * value[..., None, :]
    # A TPU or GPU would round the operands at a lower precision.
    exact = jax.lax.Precision.HIGHEST
    y = jnp.einsum("bhkv,bhk->bhv", state, q.astype(jnp.float32), precision=exact)
    return state, y.astype(v.dtype)


def linear_attention_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """A loop of steps; a reset empties the memory before its token."""
    return scan_tokens(linear_attention_step, (q, k, v), state, reset)


def linear_attention_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `linear_attention_reference` in chunks of matrix products."""
    tokens = (q, k, v, None)
    return chunks.scan_groups(chunks.linear_group, tokens, state, reset, chunk_size)


def linear_attention_tpu(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `linear_attention_reference` in kernels for a TPU."""
    return pallas_tpu.recur_tpu(q, k, v, None, state, reset)
