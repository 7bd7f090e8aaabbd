"""What the gated delta rule computes, in plain JAX, one token at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import token_loop
from memjax_kernels.delta_rule import reference as delta_rule


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    g: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← exp(g) S, then `delta_rule.step`; in float32, the read in v's dtype."""
    kept = jnp.exp(g.astype(jnp.float32))[..., None, None] * state
    return delta_rule.step(q, k, v, beta, kept)


def gated_delta_rule_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`step` for every token; a reset empties the memory before its token."""
    return token_loop.run(step, (q, k, v, beta, g), state, reset)
