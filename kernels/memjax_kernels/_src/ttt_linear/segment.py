"""Splits a segment into mini-batches, runs an implementation and joins its reads.

Every implementation (`xla.ttt_linear_xla`, `pallas_tpu.ttt_linear_tpu`) is

    f(tokens: Chunks, layer, empty, norm) -> layer, y

For each batch element, with (W, b) = `layer` and LN of (scale, bias) = `norm`:

    for j in range(n):
        if reset[j]: (W, b) = empty
        y[j], (W, b)_next = the mini-batch's reads, the layer after it
        if full[j]: (W, b) = (W, b)_next

`layer` and `empty` are float32 [B, H, K, V] and [B, H, V], as is the layer returned;
`norm` is float32 [1, H, V] twice, and y [B, n, C, H, V] has the dtype of v. A token of
zeros has no rate, so it does not train; its read is dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.ttt_linear.state import TTTLinearState, TTTLinearTokens


# Any: jax also builds these classes around shapes, shardings and axes.
class Chunks(NamedTuple):
    """Tokens of a segment, cut into n mini-batches of C.

    Attributes:
        q: [B, n, C, H, K].
        k: [B, n, C, H, K].
        v: [B, n, C, H, V].
        eta: [B, n, C, H].
        full: Bool[B, n], whether the tokens reach the end of the mini-batch.
        reset: Bool[B, n], whether it starts from `empty`; None is never.
    """

    q: Any
    k: Any
    v: Any
    eta: Any
    full: Any
    reset: Any


def in_chunks(
    implementation: Callable[..., tuple[tuple[Array, Array], Array]],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TTTLinearState,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """Runs an implementation; the arguments are those of `ttt_linear`."""
    (batch, time), size = q.shape[:2], empty.chunk_size
    # A known start of a mini-batch saves shifting every array.
    before = empty if state is None else state
    position = None if state is None else state.position

    def split(x):
        return chunks.split(x, size, position)

    # Open tokens are float32, and stay so.
    exact = position is not None and before.tokens is not None
    written = [x.astype(jnp.float32) if exact else x for x in (k, v, eta)]
    tokens = TTTLinearTokens(*map(split, written))
    tokens = open_chunk.put_in_front(tokens, before.tokens, position)
    count = chunks.count_chunks(time, size, position is None)
    full = chunks.completed(count, size, time, position, batch)
    # A reset counts at the start of a mini-batch.
    starts = None if reset is None else split(reset)[:, :, 0]
    norm = tuple(x.astype(jnp.float32)[None] for x in (ln_scale, ln_bias))
    (weights, bias), y = implementation(
        Chunks(split(q), *tokens, full, starts),
        (before.weights, before.bias),
        (empty.weights, empty.bias),
        norm,
    )
    left = open_chunk.last(tokens, time, position)
    position = (before.position + time) % size
    after = TTTLinearState(weights, bias, left, position, size)
    y = chunks.join(y, time, state and state.position)
    return after, y.astype(v.dtype)
