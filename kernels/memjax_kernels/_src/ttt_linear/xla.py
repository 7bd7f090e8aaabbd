"""TTT-linear as XLA runs it: a scan over mini-batches of matrix products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.ttt_linear import mini_batch
from memjax_kernels._src.ttt_linear.state import TTTLinearState, TTTLinearTokens


def ttt_linear_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TTTLinearState,
    *,
    remat_every: int = 4,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """The recurrence of `ttt_linear_reference`, a mini-batch at a time, in float32.

    A reset counts at the start of a mini-batch; every `remat_every`-th memory is saved
    for the backward pass.
    """
    batch, time = q.shape[:2]
    size = empty.chunk_size
    # A known start of a mini-batch saves shifting every array.
    before = empty if state is None else state
    position = None if state is None else state.position

    # A token of zeros has no rate, so it does not train; its read is dropped.
    def split(x):
        return chunks.split(x.astype(jnp.float32), size, position)

    tokens = TTTLinearTokens(split(k), split(v), split(eta))
    tokens = open_chunk.put_in_front(tokens, before.tokens, position)

    # [B, n, C, H, ...] -> [n, B, H, C, ...]
    def chunks_first(x):
        return jnp.moveaxis(x, (1, 3), (0, 2))

    count = chunks.count_chunks(time, size, position is None)
    full = chunks.completed(count, size, time, position, batch)
    starts = None
    if reset is not None:
        starts = chunks.split(reset, size, position)[:, :, 0].T
    norm = [x.astype(jnp.float32)[None] for x in (ln_scale, ln_bias)]
    emptied = empty.weights, empty.bias

    def advance(layer, item):
        q, tokens, full, start = item
        if start is not None:
            layer = open_chunk.replace(start, emptied, layer)
        after, y = mini_batch.advance(q, tokens, mini_batch.Layer(*layer, *norm))
        # A mini-batch that stays open leaves its tokens, and the layer at its start.
        return open_chunk.replace(full, after[:2], layer), y

    items = (chunks_first(split(q)), jax.tree.map(chunks_first, tokens), full.T, starts)
    layer = before.weights, before.bias
    (weights, bias), y = chunks.scan(advance, layer, items, remat_every=remat_every)
    y = chunks.join(jnp.moveaxis(y, (0, 2), (1, 3)), time, position)
    after = TTTLinearState(
        weights,
        bias,
        open_chunk.last(tokens, time, position),
        (before.position + time) % size,
        size,
    )
    return after, y.astype(v.dtype)
