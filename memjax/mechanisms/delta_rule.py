"""Delta-rule memory: fast weights corrected by their own prediction error.

    S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, eq. 24.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.mechanisms.base import Mechanism, check_input, check_sizes


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig:
    """Sizes of a delta-rule memory."""

    model_dim: int
    num_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self):
        check_sizes(**dataclasses.asdict(self))


class DeltaRuleParams(NamedTuple):
    """Learned projections."""

    query: Float[Array, "D H K"]
    key: Float[Array, "D H K"]
    value: Float[Array, "D H V"]
    rate: Float[Array, "D H"]
    output: Float[Array, "H V D"]


class DeltaRuleState(NamedTuple):
    """The memory, in float32 whatever the activations are in."""

    weights: Float[Array, "B H K V"]


def init_params(config: DeltaRuleConfig, key: PRNGKeyArray) -> DeltaRuleParams:
    """Draws the projections, each scaled by its fan-in."""
    d, h, k, v = dataclasses.astuple(config)
    q_key, k_key, v_key, rate_key, output_key = jax.random.split(key, 5)
    into = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    out_of = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    return DeltaRuleParams(
        query=into(q_key, (d, h, k)),
        key=into(k_key, (d, h, k)),
        value=into(v_key, (d, h, v)),
        rate=jax.nn.initializers.lecun_normal()(rate_key, (d, h)),
        output=out_of(output_key, (h, v, d)),
    )


def init_state(config: DeltaRuleConfig, batch: int) -> DeltaRuleState:
    """Returns a memory that recalls zero for every key."""
    shape = (batch, config.num_heads, config.key_dim, config.value_dim)
    return DeltaRuleState(jnp.zeros(shape, jnp.float32))


def step(
    params: DeltaRuleParams, state: DeltaRuleState, x: Float[Array, "B D"]
) -> tuple[DeltaRuleState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    check_input(x, params.query.shape[0], state)
    q, k, v, beta = _project(params, x)
    recalled = jnp.einsum("bhkv,bhk->bhv", state.weights, k)
    error = beta[..., None] * (v - recalled)
    weights = state.weights + jnp.einsum("bhk,bhv->bhkv", k, error)
    y = jnp.einsum("bhkv,bhk->bhv", weights, q).astype(x.dtype)
    return DeltaRuleState(weights), _merge(params, y)


def apply(
    params: DeltaRuleParams, state: DeltaRuleState, x: Float[Array, "B T D"]
) -> tuple[DeltaRuleState, Float[Array, "B T D"]]:
    """Writes a segment and reads at every position, through the op."""
    check_input(x, params.query.shape[0], state)
    q, k, v, beta = _project(params, x)
    weights, y = memjax_kernels.delta_rule(q, k, v, beta, state.weights)
    return DeltaRuleState(weights), _merge(params, y.astype(x.dtype))


def delta_rule(config: DeltaRuleConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=step,
        apply=apply,
    )


def _project(
    params: DeltaRuleParams, x: Float[Array, "*B D"]
) -> tuple[
    Float[Array, "*B H K"],
    Float[Array, "*B H K"],
    Float[Array, "*B H V"],
    Float[Array, "*B H"],
]:
    """Scaled query, unit-norm key, value and write rate of each token, in float32."""
    into = lambda weight: jnp.tensordot(x, weight.astype(x.dtype), 1).astype(
        jnp.float32
    )
    q, k, v = into(params.query), into(params.key), into(params.value)
    norm = jax.lax.rsqrt((k**2).sum(axis=-1, keepdims=True) + 1e-6)
    return q * k.shape[-1] ** -0.5, k * norm, v, jax.nn.sigmoid(into(params.rate))


def _merge(params: DeltaRuleParams, y: Float[Array, "*B H V"]) -> Float[Array, "*B D"]:
    """Joins the heads."""
    return jnp.einsum("...hv,hvd->...d", y, params.output.astype(y.dtype))
