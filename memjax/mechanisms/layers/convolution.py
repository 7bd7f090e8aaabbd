"""The causal convolution of a layer's channels, and the inputs that it carries.

Shapes: B batch, T time, C channels, W width of the filters.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax_kernels import short_convolution
from memjax_kernels._src.recurrent_block import xla


def draw_filters(
    key: PRNGKeyArray, width: int, *channels: int
) -> Float[Array, "W ..."]:
    """Filters of a depthwise convolution, whose fan-in is their width alone."""
    bound = width**-0.5
    return jax.random.uniform(key, (width, *channels), minval=-bound, maxval=bound)


def no_inputs(batch: int, width: int, channels: int) -> Float[Array, "B _ C"]:
    """The inputs before a text: zeros."""
    return jnp.zeros((batch, width - 1, channels), jnp.float32)


def last_inputs(
    before: Float[Array, "B _ *C"], x: Float[Array, "B T *C"]
) -> Float[Array, "B _ *C"]:
    """As many of the newest inputs as there were before the segment x, float32."""
    return xla.last_inputs(before.astype(jnp.float32), x)


def convolve(
    x: Float[Array, "B T C"],
    filters: Float[Array, "W C"],
    bias: Float[Array, " C"] | None,
    before: Float[Array, "B _ C"],
    positions: Int[Array, "B T"] | None,
    activation: Literal["silu", "none"],
) -> tuple[Float[Array, "B _ C"], Float[Array, "B T C"]]:
    """The last W - 1 inputs, float32, and the convolution of a segment.

    Args:
        x: inputs.
        filters: the last tap multiplies the token itself.
        bias: of each channel; None is none.
        before: the W - 1 inputs before the segment.
        positions: of each token in its document; None is one document.
        activation: of the convolved channels.
    """
    # One head of all channels.
    y = short_convolution(
        x[:, :, None],
        filters[:, None],
        before[:, :, None],
        positions,
        bias=None if bias is None else bias[None],
        activation=activation,
        unit_norm=False,
    )
    return last_inputs(before, x), y[:, :, 0]
