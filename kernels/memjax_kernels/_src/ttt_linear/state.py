"""The memory of TTT-linear: a layer in training and its position in a mini-batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_shapes, check_sizes


@dataclasses.dataclass(frozen=True)
class TTTLinearState:
    """A linear layer in training, all leaves with the batch first.

    Where `position` is 0, `weights` equals `weights_start` and `bias` `bias_start`.

    Attributes:
        weights_start: [B, H, K, V] float32, at the mini-batch's start: gradients are
            taken here.
        weights: [B, H, K, V] float32, after the tokens so far: reads are made here.
        bias_start: [B, H, V] float32, at the mini-batch's start.
        bias: [B, H, V] float32, after the tokens so far.
        position: [B] int32, tokens of the open mini-batch so far, in [0, chunk_size).
        chunk_size: C, tokens of a mini-batch; static.
    """

    # Any: jax also builds the class around shapes, shardings and axes.
    weights_start: Any
    weights: Any
    bias_start: Any
    bias: Any
    position: Any
    chunk_size: int = dataclasses.field(metadata={"static": True})


jax.tree_util.register_dataclass(TTTLinearState)


def ttt_linear_state(
    weights: Float[Array, "B H K V"], bias: Float[Array, "B H V"], chunk_size: int
) -> TTTLinearState:
    """The memory before a first token, from learned weights, say."""
    check_shapes(weights=(weights, "B H K V"), bias=(bias, "B H V"))
    check_sizes(chunk_size=chunk_size)
    position = jnp.zeros(weights.shape[0], jnp.int32)
    weights, bias = weights.astype(jnp.float32), bias.astype(jnp.float32)
    return TTTLinearState(weights, weights, bias, bias, position, chunk_size)


def ttt_linear_init_state(
    batch: int, heads: int, width: int, chunk_size: int
) -> TTTLinearState:
    """The memory of zero weights; of learned ones it is `ttt_linear_state`."""
    # The layer norm's slope at zero is 1 / sqrt(eps) = 1000, so that the first step
    # from here is long.
    check_sizes(batch=batch, heads=heads, width=width)
    weights = jnp.zeros((batch, heads, width, width), jnp.float32)
    bias = jnp.zeros((batch, heads, width), jnp.float32)
    return ttt_linear_state(weights, bias, chunk_size)
