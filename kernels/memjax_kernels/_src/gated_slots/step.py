"""Gated slots one token at a time, in plain JAX: the definition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_sizes
from memjax_kernels._src.common.steps import one_pass

# A TPU or GPU would round the operands at a lower precision.
_EXACT = jax.lax.Precision.HIGHEST


class GatedSlotsState(NamedTuple):
    """The memory: M slots, each with a key and a value.

    Attributes:
        keys: what queries are compared with.
        values: what they read.
    """

    keys: Float[Array, "B H M K"]
    values: Float[Array, "B H M V"]


def gated_slots_init_state(
    batch: int, heads: int, slots: int, key_dim: int, value_dim: int
) -> GatedSlotsState:
    """The memory before the first token: zeros, float32."""
    check_sizes(batch=batch, heads=heads, slots=slots)
    check_sizes(key_dim=key_dim, value_dim=value_dim)
    return GatedSlotsState(
        keys=jnp.zeros((batch, heads, slots, key_dim), jnp.float32),
        values=jnp.zeros((batch, heads, slots, value_dim), jnp.float32),
    )


@one_pass.on_tpu
def gated_slots_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    alpha: Float[Array, "B H M"],
    g: Float[Array, "B H M"] | None,
    state: GatedSlotsState,
) -> tuple[GatedSlotsState, Float[Array, "B H V"]]:
    """K̃ ← diag(exp(g)) K̃ + α kᵀ, Ṽ alike with v, then y = Ṽᵀ softmax(K̃ q).

    In float32, the read in the dtype of v; no g, no forgetting.
    """
    q32, k32, v32, write = (x.astype(jnp.float32) for x in (q, k, v, alpha))
    keys, values = state
    if g is not None:
        decay = jnp.exp(g.astype(jnp.float32))[..., None]
        keys, values = decay * keys, decay * values
    keys = keys + write[..., None] * k32[..., None, :]
    values = values + write[..., None] * v32[..., None, :]
    # The slots are read after the write: a token sees itself.
    weights = jax.nn.softmax(jnp.einsum("bhmk,bhk->bhm", keys, q32, precision=_EXACT))
    y = jnp.einsum("bhmv,bhm->bhv", values, weights, precision=_EXACT)
    return GatedSlotsState(keys=keys, values=values), y.astype(v.dtype)
