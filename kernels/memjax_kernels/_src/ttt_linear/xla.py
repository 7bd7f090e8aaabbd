"""TTT-linear as XLA runs it: a scan over mini-batches of matrix products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.ttt_linear import mini_batch
from memjax_kernels._src.ttt_linear.state import TTTLinearTokens


def ttt_linear_xla(
    x: Chunks,
    layer: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    empty: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    norm: tuple[Float[Array, "#B H V"], Float[Array, "#B H V"]],
) -> tuple[tuple[Array, Array], Float[Array, "B n C H V"]]:
    """A chunk implementation in float32; see `segment`."""

    def advance(layer, tokens, gates):
        q, *tokens = jax.tree.map(lambda x: x.astype(jnp.float32), (*tokens, *gates))
        weights, bias = layer
        given = mini_batch.Layer(weights, bias, *norm)
        after, y = mini_batch.advance(q, TTTLinearTokens(*tokens), given)
        return after[:2], y

    return segment.scan_chunks(advance, x, layer, empty, remat_every=4)
