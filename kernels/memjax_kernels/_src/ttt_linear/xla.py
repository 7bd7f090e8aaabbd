"""TTT-linear as XLA runs it: a scan over mini-batches of matrix products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.ttt_linear import mini_batch
from memjax_kernels._src.ttt_linear.segment import Chunks
from memjax_kernels._src.ttt_linear.state import TTTLinearTokens


def ttt_linear_xla(
    tokens: Chunks,
    layer: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    empty: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    norm: tuple[Float[Array, "#B H V"], Float[Array, "#B H V"]],
    *,
    remat_every: int = 4,
) -> tuple[tuple[Array, Array], Float[Array, "B n C H V"]]:
    """A chunk implementation in float32; see `segment`.

    Every `remat_every`-th memory is saved for the backward pass.
    """

    # [B, n, C, H, ...] -> [n, B, H, C, ...]
    def chunks_first(x):
        return jnp.moveaxis(x.astype(jnp.float32), (1, 3), (0, 2))

    def advance(layer, item):
        q, tokens, full, start = item
        if start is not None:
            layer = open_chunk.replace(start, empty, layer)
        weights, bias = layer
        given = mini_batch.Layer(weights, bias, *norm)
        after, y = mini_batch.advance(q, tokens, given)
        # A mini-batch that stays open leaves its tokens, and the layer at its start.
        return open_chunk.replace(full, after[:2], layer), y

    q, k, v, eta = map(chunks_first, tokens[:4])
    flags = jax.tree.map(jnp.transpose, tokens[4:])
    items = q, TTTLinearTokens(k, v, eta), *flags
    layer, y = chunks.scan(advance, layer, items, remat_every=remat_every)
    return layer, jnp.moveaxis(y, (0, 2), (1, 3)).astype(tokens.v.dtype)
