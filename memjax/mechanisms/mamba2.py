"""Mamba-2: linear attention whose heads forget at a pace that the token sets.

    Δ_t = softplus(w x + b)        g_t = -exp(log A) Δ_t
    S_t = exp(g_t) S_{t-1} + k_t (Δ_t v_t)ᵀ        y_t = S_tᵀ q_t / √K + s v_t

Dao & Gu (2024), https://arxiv.org/abs/2405.21060, section 7 with C = q, B = k, X = v,
and its skip weight s (their D). It is initialised as there: A in [1, 16], Δ in
[0.001, 0.1]. Other than there, q and k are of unit norm and v is not convolved, as in
the block that all recurrent mechanisms share.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent_block import BlockConfig, Core
from memjax_kernels.linear_attention.ssd import empty_state, step


class DecayParams(NamedTuple):
    """What sets the pace of forgetting, of Mamba-2 and Gated DeltaNet."""

    pace: Gate
    log_rate: Float[Array, " H"]


class Mamba2Params(NamedTuple):
    """Learned gates."""

    decay: DecayParams
    skip: Float[Array, " H"]


def init_decay(config: BlockConfig, key: PRNGKeyArray) -> DecayParams:
    """Draws paces between 0.001 and 0.1, log-uniform, and rates between 1 and 16."""
    weight_key, pace_key, rate_key = jax.random.split(key, 3)
    heads = config.num_heads
    low, high = jnp.log(0.001), jnp.log(0.1)
    pace = jnp.exp(jax.random.uniform(pace_key, (heads,), minval=low, maxval=high))
    rate = jax.random.uniform(rate_key, (heads,), minval=1.0, maxval=16.0)
    return DecayParams(
        pace=Gate(
            weight=gates.draw_weight(weight_key, config.model_dim, heads),
            bias=jnp.log(jnp.expm1(pace)),
        ),
        log_rate=jnp.log(rate),
    )


def decay(
    params: DecayParams, x: Float[Array, "*B D"]
) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
    """Δ > 0 and the log gate g < 0 of every token."""
    pace = jax.nn.softplus(gates.gate_logits(params.pace, x))
    rate = jnp.exp(params.log_rate).reshape((1,) * (pace.ndim - 1) + (-1,))
    return pace, -rate * pace


def mamba2(config: BlockConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""

    def init_params(key: PRNGKeyArray) -> Mamba2Params:
        return Mamba2Params(init_decay(config, key), jnp.ones(config.num_heads))

    def run(call):
        def tokens(params, memory, x, q, k, v):
            pace, g = decay(params.decay, x)
            write = (v * pace[..., None]).astype(v.dtype)
            q = q * config.key_dim**-0.5
            memory, y = call(q, k, write, g, memory)
            skip = params.skip.reshape((1,) * (v.ndim - 2) + (-1, 1))
            return memory, y + (skip * v).astype(v.dtype)

        return tokens

    core = Core(
        init_params=init_params,
        init_memory=lambda batch: empty_state(
            batch, config.num_heads, config.key_dim, config.value_dim
        ),
        step=run(step),
        apply=run(memjax_kernels.ssd),
    )
    return recurrent_block.build(config, core)
