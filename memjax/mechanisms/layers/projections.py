"""Query, key, value and output projections of the attention family.

All of the family have one parameter type, so that the weights of full attention load
into a sliding window or an Elastic Memory as they are. Biases that a model lacks are
None.

`linear` is the product of every weight that may be adapted (LoRA), of the feed-forward
layers too: Hu et al. (2021), https://arxiv.org/abs/2106.09685.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax.mechanisms.base import axes
from memjax.mechanisms.layers import rope
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.norms import expand_leading_dims, rms_norm
from memjax_kernels._src.common.cpu import weigh
from memjax_kernels._src.common.partition import by_heads, by_tokens
from memjax_kernels._src.stored_product import Stored, stored_product


class Adapted(NamedTuple):
    """A weight W changed by a low-rank product, which is never formed (LoRA).

        x (W + scale * down up)    computed as    x W + scale * ((x down) up)

    `linear` takes it in the place of any weight. Axes I are those that the product
    sums over, O those of its result, R the rank.
    """

    weight: Float[Array, "..."]
    down: Float[Array, "... R"]
    up: Float[Array, "R ..."]
    scale: float | Float[Array, ""]


Weight = Array | Adapted | Stored


class AttentionParams(NamedTuple):
    """Learned projections of an attention layer, whatever its memory."""

    query: Float[Array, "D H K"] | Adapted
    key: Float[Array, "D G K"] | Adapted
    value: Float[Array, "D G K"] | Adapted
    output: Float[Array, "H K D"] | Adapted
    query_bias: Float[Array, "H K"] | None = None
    key_bias: Float[Array, "G K"] | None = None
    value_bias: Float[Array, "G K"] | None = None
    output_bias: Float[Array, " D"] | None = None
    query_norm: Float[Array, "*H K"] | None = None
    key_norm: Float[Array, "*G K"] | None = None
    gate: Float[Array, "D H K"] | Adapted | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        gate = () if self.gate is None else ("gate",)
        return ("query", "key", "value", *gate, "output")


#: Sharding axes of the projections; see `MechanismConfig.param_axes`.
AXES = AttentionParams(
    query=axes("model", "heads"),
    key=axes("model", "heads"),
    value=axes("model", "heads"),
    output=axes("heads", None, "model"),
    query_bias=axes(),
    key_bias=axes(),
    value_bias=axes(),
    output_bias=axes(),
    query_norm=axes(),
    key_norm=axes(),
    gate=axes("model", "heads"),
)


def init_params(config: HeadsConfig, key: PRNGKeyArray) -> AttentionParams:
    """Draws the projections, each scaled by its fan-in; biases start at 0."""
    d, h, g, k = (
        config.model_dim,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    query_key, key_key, value_key, output_key = jax.random.split(key, 4)
    # By the fan-in: heads are an output axis here and an input axis below.
    into = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    out_of = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    return AttentionParams(
        query=into(query_key, (d, h, k)),
        key=into(key_key, (d, g, k)),
        value=into(value_key, (d, g, k)),
        output=out_of(output_key, (h, k, d)),
        query_bias=jnp.zeros((h, k)) if config.qkv_bias else None,
        key_bias=jnp.zeros((g, k)) if config.qkv_bias else None,
        value_bias=jnp.zeros((g, k)) if config.qkv_bias else None,
        output_bias=jnp.zeros(d) if config.output_bias else None,
        query_norm=_init_norm(config, h),
        key_norm=_init_norm(config, g),
        # A key of its own, so that the other parameters stay what they are.
        gate=(
            into(jax.random.fold_in(key, 1), (d, h, k)) if config.output_gate else None
        ),
    )


def _init_norm(config: HeadsConfig, heads: int) -> Array | None:
    """The scale of the norm of `heads` queries or keys, where they have one."""
    match config.qk_norm:
        case "none":
            return None
        case "head":
            return jnp.ones(config.head_dim)
        case "width":
            return jnp.ones((heads, config.head_dim))


def linear(
    x: Float[Array, "..."], weight: Weight, bias: Array | None = None, axes: int = 1
) -> Float[Array, "..."]:
    """x W + b in the dtype of x, summed over the last `axes` axes of x.

    Args:
        x: [..., *I], I the axes that are summed over.
        weight: [*I, *O], such a weight with a low-rank change, or as a file has it.
        bias: [*O]; None is none.
        axes: how many axes I are.

    Returns:
        [..., *O].
    """
    if isinstance(weight, Adapted):
        y = linear(x, weight.weight, axes=axes)
        # Through the narrow axis: down up, as large as W, is never formed.
        change = linear(linear(x, weight.down, axes=axes), weight.up)
        y = y + change * jnp.asarray(weight.scale, x.dtype)
    elif isinstance(weight, Stored):
        leading = x.shape[: x.ndim - axes]
        y = stored_product(x.reshape(*leading, -1), weight).astype(x.dtype)
        y = y.reshape(*leading, *weight.shape[axes:])
    else:
        # Axes of heads and channels as one: two would be laid out otherwise on a TPU.
        summed = weight.shape[:axes]
        flat = weight.reshape(math.prod(summed), -1).astype(x.dtype)
        leading = x.shape[: x.ndim - axes]
        y = weigh(x.reshape(*leading, flat.shape[0]), flat)
        y = y.reshape(*leading, *weight.shape[axes:])
    if bias is None:
        return y
    return y + expand_leading_dims(bias.astype(x.dtype), y)


def times(x: Float[Array, "*B"], factor: float) -> Float[Array, "*B"]:
    """x times a constant of the configuration, in the dtype of x."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def qkv_projection(
    config: HeadsConfig, params: AttentionParams, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Queries, keys and values in the dtype of x, without positions."""
    return (
        by_heads(query_projection(config, params, x)),
        by_heads(key_projection(config, params, x)),
        by_heads(linear(x, params.value, params.value_bias)),
    )


def rotated_qkv_projection(
    config: HeadsConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    positions: Int[Array, "*B T"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Queries and keys with RoPE, and values."""
    q, k, v = qkv_projection(config, params, x)
    return apply_rope(config, q, positions), apply_rope(config, k, positions), v


def query_projection(
    config: HeadsConfig, params: AttentionParams, x: Float[Array, "B T D"]
) -> Float[Array, "B T H K"]:
    """Queries, normalised and scaled where the layer does so, without positions."""
    q = linear(x, params.query, params.query_bias)
    q = _normalize(config, params.query_norm, q)
    if config.query_scale is None:
        return q
    # Attention multiplies scores by K^-1/2.
    return q * (config.query_scale * config.head_dim**0.5)


def key_projection(
    config: HeadsConfig, params: AttentionParams, x: Float[Array, "B T D"]
) -> Float[Array, "B T G K"]:
    """Keys, normalised where the layer does so, without positions."""
    k = linear(x, params.key, params.key_bias)
    return _normalize(config, params.key_norm, k)


def _normalize(config: HeadsConfig, scale: Array | None, x: Array) -> Array:
    """The norm of queries or keys [..., H, K], of each head or of all together."""
    if scale is None:
        return x
    if scale.ndim == 1:
        return rms_norm(x, scale, config.qk_norm_epsilon)
    joined = x.reshape(*x.shape[:-2], -1)
    return rms_norm(joined, scale.reshape(-1), config.qk_norm_epsilon).reshape(x.shape)


def output_projection(
    params: AttentionParams, y: Float[Array, "B T H K"], x: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Joins the heads of the reads y of the tokens x, gated where the layer does so."""
    if params.gate is not None:
        y = y * jax.nn.sigmoid(by_heads(linear(x, params.gate)))
    # Summed over heads and their widths at once, so that heads need not be joined
    # first.
    return linear(by_tokens(y), params.output, params.output_bias, axes=2)


def apply_rope(
    config: HeadsConfig, x: Float[Array, "*B T H K"], positions: Int[Array, "*P T"]
) -> Float[Array, "*B T H K"]:
    """Queries or keys rotated by their positions, where the layer has RoPE."""
    # The model adds learned positions to its embeddings instead.
    if config.rope_theta is None:
        return x
    turned, rest = _turned(config, x)
    turned = rope.rotate(turned, positions, config.rope_theta, config.rope_scaling)
    return _joined(turned, rest)


def remove_rope(
    config: HeadsConfig, x: Float[Array, "*B T H K"], positions: Int[Array, "*P T"]
) -> Float[Array, "*B T H K"]:
    """Undoes `apply_rope`, to rounding."""
    x = apply_rope(config, x, -positions)
    # Each of the two rotations has scaled it.
    return remove_amplitude(config, remove_amplitude(config, x))


def remove_amplitude(
    config: HeadsConfig, x: Float[Array, "*B T H K"]
) -> Float[Array, "*B T H K"]:
    """Queries or keys without YaRN's factor of one rotation."""
    if config.rope_theta is None or config.rope_scaling is None:
        return x
    turned, rest = _turned(config, x)
    return _joined(turned / config.rope_scaling.amplitude, rest)


def _turned(config, x):
    """The channels of a head that RoPE turns, and the others."""
    width = config.rope_dim or config.head_dim
    return (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])


def _joined(turned, rest):
    return turned if rest is None else jnp.concatenate([turned, rest], axis=-1)
