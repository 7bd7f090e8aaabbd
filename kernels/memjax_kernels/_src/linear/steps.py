"""One token of each linear op, in float32: the definition.

y has the dtype of v. Where a step is lowered for a TPU it is one kernel: `one_pass`.
"""

import inspect

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_sizes
from memjax_kernels._src.common.steps import one_pass

#: The memory of all linear ops: a matrix for each head, float32.
MatrixState = Float[Array, "B H K V"]

F32 = jnp.float32


def linear_attention_init_state(
    batch: int, heads: int, key_dim: int, value_dim: int
) -> MatrixState:
    """The memory before the first token: zeros, float32."""
    check_sizes(batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim)
    return jnp.zeros((batch, heads, key_dim, value_dim), F32)


@one_pass.on_tpu
def linear_attention_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    key, value = k.astype(F32), v.astype(F32)
    state = state + key[..., :, None] * value[..., None, :]
    # A TPU or GPU would round the operands at a lower precision.
    exact = jax.lax.Precision.HIGHEST
    y = jnp.einsum("bhkv,bhk->bhv", state, q.astype(F32), precision=exact)
    return state, y.astype(v.dtype)


@one_pass.on_tpu
def ssd_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← exp(g) S + k vᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    decayed = jnp.exp(g.astype(F32))[..., None, None] * state
    return inspect.unwrap(linear_attention_step)(q, k, v, decayed)


@one_pass.on_tpu
def gla_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← diag(exp(g)) S + k vᵀ, y = Sᵀq; in float32, the read in the dtype of v."""
    decayed = jnp.exp(g.astype(F32))[..., None] * state
    return inspect.unwrap(linear_attention_step)(q, k, v, decayed)


@one_pass.on_tpu
def delta_rule_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← S + β k (v - Sᵀk)ᵀ, then y = Sᵀq; in float32, the read in the dtype of v."""
    q, k, value, beta = (x.astype(F32) for x in (q, k, v, beta))
    # The prediction is of the memory before the write: the error is written.
    error = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + jnp.einsum("bhk,bhv->bhkv", k, error)
    return state, jnp.einsum("bhkv,bhk->bhv", state, q).astype(v.dtype)


@one_pass.on_tpu
def gated_delta_rule_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    g: Float[Array, "B H"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← exp(g) S, then the delta rule; in float32, y in the dtype of v."""
    decayed = jnp.exp(g.astype(F32))[..., None, None] * state
    return inspect.unwrap(delta_rule_step)(q, k, v, beta, decayed)


@one_pass.on_tpu
def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    beta: Float[Array, "B H"],
    g: Float[Array, "B H K"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← diag(exp(g)) S, then the delta rule; in float32, y in the dtype of v."""
    decayed = jnp.exp(g.astype(F32))[..., None] * state
    return inspect.unwrap(delta_rule_step)(q, k, v, beta, decayed)


@one_pass.on_tpu
def gdn2_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    erase: Float[Array, "B H K"],
    write: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    state: MatrixState,
) -> tuple[MatrixState, Float[Array, "B H V"]]:
    """S ← diag(exp(g)) S, S ← S + k (w ∘ v - Sᵀ(e ∘ k))ᵀ, y = Sᵀq; in float32."""
    q, k, value, erase, write = (x.astype(F32) for x in (q, k, v, erase, write))
    state = jnp.exp(g.astype(F32))[..., None] * state
    error = write * value - jnp.einsum("bhkv,bhk->bhv", state, erase * k)
    state = state + jnp.einsum("bhk,bhv->bhkv", k, error)
    return state, jnp.einsum("bhkv,bhk->bhv", state, q).astype(v.dtype)
