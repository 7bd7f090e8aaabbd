"""The memory of TTT-linear: a layer in training, and its open mini-batch."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_shapes, check_sizes
from memjax_kernels._src.common.steps import open_chunk


# Any: jax also builds these classes around shapes, shardings and axes.
class TTTLinearTokens(NamedTuple):
    """Tokens of a mini-batch: k and v [B, H, ., K], eta [B, H, .]."""

    k: Any
    v: Any
    eta: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TTTLinearState:
    """A linear layer in training, all leaves with the batch first.

    Attributes:
        weights: [B, H, K, V] float32, at the start of the open mini-batch.
        bias: [B, H, V] float32, likewise.
        tokens: of the open mini-batch, float32 with an axis of C and zeros behind the
            last; None where C = 1.
        position: [B] int32, their number, in [0, chunk_size).
        chunk_size: C, tokens of a mini-batch; static.
    """

    weights: Any
    bias: Any
    tokens: Any
    position: Any
    chunk_size: int = dataclasses.field(metadata={"static": True})


def ttt_linear_state(
    weights: Float[Array, "B H K V"], bias: Float[Array, "B H V"], chunk_size: int
) -> TTTLinearState:
    """The memory before a first token, from learned weights, say."""
    check_shapes(weights=(weights, "B H K V"), bias=(bias, "B H V"))
    check_sizes(chunk_size=chunk_size)
    batch, heads, key, value = weights.shape
    one = TTTLinearTokens((batch, heads, key), (batch, heads, value), (batch, heads))
    return TTTLinearState(
        weights.astype(jnp.float32),
        bias.astype(jnp.float32),
        open_chunk.empty(chunk_size, one),
        jnp.zeros(batch, jnp.int32),
        chunk_size,
    )


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
