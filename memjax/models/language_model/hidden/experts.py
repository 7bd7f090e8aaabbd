"""Mixture of experts: feed-forwards of which each token has a few.

    y = sum_{e chosen} w_e(x) FFN_e(x)  +  sigma(x W_g) FFN_shared(x)

Shazeer et al. (2017), https://arxiv.org/abs/1701.06538, equation 1; the shared expert,
which every token has, is that of Dai et al. (2024), https://arxiv.org/abs/2401.06066,
equation 9. An expert takes all tokens that chose it: none is dropped, no batch element
changes another, and any split of a text gives the same. `router` has the weights.

Shapes: D model, E experts, F hidden, N tokens, k experts of a token.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from memjax.mechanisms.layers.projections import linear
from memjax.models.language_model.config import BlockStyle, ModelConfig
from memjax.models.language_model.hidden.dense import (
    FeedForwardParams,
    feed_forward,
    init_feed_forward,
)
from memjax.models.language_model.hidden.router import ExpertsConfig, route
from memjax_kernels._src.common.partition import by_experts
from memjax_kernels._src.grouped_product import grouped_product, sort_by_group


class ExpertsParams(NamedTuple):
    """Parameters of a mixture of experts; what a model lacks is None.

    The matrices of the routed experts have E first.
    """

    router: Float[Array, "D E"]
    routed: FeedForwardParams
    router_bias: Float[Array, " E"] | None = None
    shared: FeedForwardParams | None = None
    shared_gate: Float[Array, "D 1"] | None = None

    @property
    def lora_parts(self) -> tuple[str, ...]:
        """Parameters whose matrices LoRA may change: not the routed experts'."""
        return () if self.shared is None else ("shared",)


def init_experts(
    config: ModelConfig, style: BlockStyle, keys: Key[Array, "3"]
) -> ExpertsParams:
    """Draws the matrices, scaled by their fan-in; the router's bias is 0."""
    routed_key, shared_key, router_key = keys
    mixture, d = _mixture(style), config.model_dim
    e = mixture.num_experts

    def of_width(width):
        each = dataclasses.replace(style, experts=None, hidden_dim=width)
        return functools.partial(init_feed_forward, config, each)

    draw = jax.nn.initializers.lecun_normal()
    router_key, gate_key = jax.random.split(router_key)
    routed = jax.vmap(of_width(mixture.hidden_dim))(
        jax.random.split(routed_key, (e, 3))
    )
    shared = None
    if mixture.shared_dim:
        shared = of_width(mixture.shared_dim)(jax.random.split(shared_key, 3))
    return ExpertsParams(
        router=draw(router_key, (d, e)),
        routed=routed,
        router_bias=jnp.zeros(e) if mixture.router == "sigmoid" else None,
        shared=shared,
        shared_gate=draw(gate_key, (d, 1)) if mixture.shared_gate else None,
    )


def experts(
    config: ModelConfig,
    style: BlockStyle,
    params: ExpertsParams,
    x: Float[Array, "*B D"],
) -> Float[Array, "*B D"]:
    """The mixture, in the dtype of x; the router computes in float32.

    A mesh divides the experts along the axis that divides heads elsewhere: each device
    computes those that it has for its tokens, and the sums are exchanged. On CPUs and
    GPUs, experts that no token chose are not read.

    Raises:
        ValueError: the mesh does not divide the experts.
    """
    router = (params.router, params.router_bias)
    routed = functools.partial(_routed, config, style)
    y = by_experts(routed)(x, router, params.routed)
    if params.shared is None:
        return y
    shared = feed_forward(config, style, params.shared, x)
    if params.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(linear(x, params.shared_gate))
    return y + shared


def _mixture(style) -> ExpertsConfig:
    assert style.experts is not None
    return style.experts


def _routed(config, style, x, router, routed, first):
    """The sum over those experts that are here, the first of which is `first`."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = route(_mixture(style), router, tokens)
    here, k = routed.up.shape[0], chosen.shape[-1]
    # Pairs of token and expert, sorted by expert; those of experts elsewhere last.
    local = chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < here), local, here)
    order, back, sizes = sort_by_group(local, here)

    def product(rows, matrices, bias):
        assert bias is None
        return grouped_product(rows, matrices, sizes)

    y = feed_forward(config, style, routed, tokens[order // k], product)
    # Back in the order of tokens: a sum of neighbours, where a scatter would be slow.
    y = y[back].reshape(*chosen.shape, -1)
    y = (weights[..., None] * y.astype(jnp.float32)).sum(axis=-2)
    return y.astype(x.dtype).reshape(x.shape)
