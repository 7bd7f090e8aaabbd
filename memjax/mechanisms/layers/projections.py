"""Query, key, value and output projections of the attention family.

All of the family have one parameter type, so that the weights of full attention load
into a sliding window or an Elastic Memory as they are. Biases that a model lacks are
None.

`linear` is the product of every weight that may be adapted (LoRA), of the feed-forward
layers too: Hu et al. (2021), https://arxiv.org/abs/2106.09685.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import axes, expand_leading_dims
from memjax.mechanisms.layers import rope
from memjax.mechanisms.layers.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Sizes of the projections.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads` (GQA).
        head_dim: width of a head, even (RoPE turns pairs).
        rope_theta: base of the RoPE frequencies; 500,000 in Llama 3. None is no RoPE:
            the model adds positions itself.
        rope_scaling: how the frequencies were slowed down for longer texts.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether the output has one.
    """

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = 500_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    def __post_init__(self):
        check_sizes(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.rope_theta is not None:
            check_positive(rope_theta=self.rope_theta)
        if self.rope_theta is None and self.rope_scaling is not None:
            raise ValueError("rope_scaling needs a rope_theta, got None")


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


Weight = Array | Adapted


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


#: How the projections are divided among devices; see `MixerConfig.param_axes`.
AXES = AttentionParams(
    query=axes("model", "heads"),
    key=axes("model", "heads"),
    value=axes("model", "heads"),
    output=axes("heads", None, "model"),
    query_bias=axes(),
    key_bias=axes(),
    value_bias=axes(),
    output_bias=axes(),
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
    )


def linear(
    x: Float[Array, "..."], weight: Weight, bias: Array | None = None, axes: int = 1
) -> Float[Array, "..."]:
    """x W + b in the dtype of x, summed over the last `axes` axes of x.

    Args:
        x: [..., *I], I the axes that are summed over.
        weight: [*I, *O], or a weight with a low-rank change.
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
    else:
        y = jnp.tensordot(x, weight.astype(x.dtype), axes)
    if bias is None:
        return y
    return y + expand_leading_dims(bias.astype(x.dtype), y)


def qkv_projection(
    params: AttentionParams, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Queries, keys and values in the dtype of x, without positions."""
    return (
        linear(x, params.query, params.query_bias),
        linear(x, params.key, params.key_bias),
        linear(x, params.value, params.value_bias),
    )


def output_projection(
    params: AttentionParams, y: Float[Array, "B T H K"]
) -> Float[Array, "B T D"]:
    """Joins the heads."""
    # Summed over heads and their widths at once, so that heads need not be joined
    # first.
    return linear(y, params.output, params.output_bias, axes=2)


def apply_rope(
    config: HeadsConfig, x: Float[Array, "*B T H K"], positions: Int[Array, "*P T"]
) -> Float[Array, "*B T H K"]:
    """Queries or keys rotated by their positions, where the layer has RoPE."""
    # The model adds learned positions to its embeddings instead.
    if config.rope_theta is None:
        return x
    return rope.rotate(x, positions, config.rope_theta, config.rope_scaling)
