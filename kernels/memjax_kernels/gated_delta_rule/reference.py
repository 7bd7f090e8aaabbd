"""What the gated delta rule computes, in plain JAX, one token at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.delta_rule.reference import step as delta_step


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    g: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """S ← eᵍ S, S ← S + β k (v - Sᵀk)ᵀ, then y = Sᵀq: in float32, y in v's dtype.

    Raises:
        ValueError: on a state that is not float32.
    """
    keep = jnp.exp(g.astype(jnp.float32))[..., None, None]
    return delta_step(q, k, v, beta, keep * state)


def gated_delta_rule_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`step` on every token, on an empty memory where `reset` says so."""

    def body(state, token):
        *tokens, reset = token
        if reset is not None:
            state = jnp.where(reset[:, None, None, None], 0.0, state)
        return step(*tokens, state)

    tokens = (q, k, v, beta, g, reset)
    state, y = jax.lax.scan(
        body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    )
    return state, jnp.moveaxis(y, 0, 1)
