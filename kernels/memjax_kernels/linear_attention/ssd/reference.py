"""What the SSD op computes, one token at a time, in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import token_loop
from memjax_kernels.linear_attention import reference as linear_attention


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← exp(g) S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    kept = jnp.exp(g.astype(jnp.float32))[..., None, None] * state
    return linear_attention.step(q, k, v, kept)


def ssd_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`step` for every token; a reset empties the memory before its token."""
    return token_loop.run(step, (q, k, v, g), state, reset)
