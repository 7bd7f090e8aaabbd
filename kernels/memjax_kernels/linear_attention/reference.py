"""What the linear-attention op computes, one token at a time, in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import token_loop

# Else a TPU or GPU would round the operands.
_EXACT = jax.lax.Precision.HIGHEST


def empty_state(
    batch: int, heads: int, key_dim: int, value_dim: int
) -> Float[Array, "B H K V"]:
    """The memory before the first token: zeros, float32."""
    return jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    key, value = k.astype(jnp.float32), v.astype(jnp.float32)
    state = state + key[..., :, None] * value[..., None, :]
    y = jnp.einsum("bhkv,bhk->bhv", state, q.astype(jnp.float32), precision=_EXACT)
    return state, y.astype(v.dtype)


def linear_attention_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`step` for every token; a reset empties the memory before its token."""
    return token_loop.run(step, (q, k, v), state, reset)
