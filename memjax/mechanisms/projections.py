"""Query, key, value and output projections shared by the attention family.

One parameter type for all of them, so that the weights of a plain attention layer
load into a sliding window or an Elastic Memory as they are.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax.mechanisms.base import check_sizes


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Sizes of the projections.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads` (GQA).
        head_dim: width of a head, even (RoPE turns pairs).
        rope_theta: base of the RoPE frequencies; 500,000 in Llama 3.
    """

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 500_000.0

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
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta}")


class AttentionParams(NamedTuple):
    """Learned projections of an attention layer, whatever its memory."""

    query: Float[Array, "D H K"]
    key: Float[Array, "D G K"]
    value: Float[Array, "D G K"]
    output: Float[Array, "H K D"]


def init_params(config: HeadsConfig, key: PRNGKeyArray) -> AttentionParams:
    """Draws the projections, each scaled by its fan-in."""
    d, h, g, k = (
        config.model_dim,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    query_key, key_key, value_key, output_key = jax.random.split(key, 4)
    into = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    out_of = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    return AttentionParams(
        query=into(query_key, (d, h, k)),
        key=into(key_key, (d, g, k)),
        value=into(value_key, (d, g, k)),
        output=out_of(output_key, (h, k, d)),
    )


def project(
    params: AttentionParams, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Queries, keys and values in the dtype of x, without positions."""
    into = lambda weight: jnp.einsum("btd,dhk->bthk", x, weight.astype(x.dtype))
    return into(params.query), into(params.key), into(params.value)


def merge(params: AttentionParams, y: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
    """Joins the heads."""
    return jnp.einsum("bthk,hkd->btd", y, params.output.astype(y.dtype))


def rotate(
    x: Float[Array, "*B T H K"], positions: Int[Array, "*P T"], theta: float
) -> Float[Array, "*B T H K"]:
    """Turns each pair of channels (i, i + K/2) by its position: RoPE.

    Su et al. (2021), https://arxiv.org/abs/2104.09864, in the half-split layout of
    Llama. Angles are float32; the result has the dtype of x.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32)
    angles = (angles * _like(frequencies, angles))[..., None, :]
    angles = _like(angles, x)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _like(small: Array, large: Array) -> Array:
    """Leads `small` with axes of 1 until it has as many as `large`."""
    return small.reshape((1,) * (large.ndim - small.ndim) + small.shape)
