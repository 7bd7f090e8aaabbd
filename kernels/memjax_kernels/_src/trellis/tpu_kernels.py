"""The two kernels of Trellis on a TPU: one chunk of a few heads, forward and backward.

Each of them takes references to blocks in VMEM. `before` and `running` hold the
memories at the start of the first chunk. `after` and `d_before` are output blocks that
all chunks of a head share: they hold the memories, or their cotangents, between chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis.state import Memories

F32 = jnp.float32


class Inputs(NamedTuple):
    """Tokens as the kernels take them, G = B H; a tuple holds one for each pass.

    Attributes:
        q: [G, n, C, K].
        inputs: [G, n, C, K], [G, n, C, V].
        alpha: [G, n, C, M].
        gates: [G, n, R, C] float32: gamma of each pass, g of each pass, full,
            and reset if resets were given.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any


def _read(x: Inputs):
    """The chunk of an `Inputs` of references, and its flags."""
    rows = [x.gates[:, i, :] for i in range(x.gates.shape[1])]
    flags = [row[:, :1][:, :, None] for row in rows[4:]]
    chunk = one_chunk.Chunk(
        x.q[...],
        (x.inputs[0][...], x.inputs[1][...]),
        x.alpha[...],
        (rows[0], rows[1]),
        (rows[2], rows[3]),
    )
    return chunk, flags[0], (flags[1] if len(flags) > 1 else None)


def _load(refs):
    return jax.tree.map(lambda ref: ref[...].astype(F32), refs)


def _store(refs, values):
    jax.tree.map(lambda ref, x: ref.__setitem__(..., x.astype(ref.dtype)), refs, values)


def forward_kernel(x, before, empty, after, y, residuals, *, options):
    """One chunk; with `residuals`, also saves the memories before it."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        # Chunks of a head share this output block.
        _store(after, _load(before))

    memories = _load(after)
    if residuals is not None:
        _store(residuals, memories.start)
    chunk, full, reset = _read(x)
    memories, read = one_chunk.advance(
        chunk, memories, _load(empty), full, reset, options
    )
    _store(after, memories)
    _store(y, read)


def backward_kernel(
    x, running, empty, residuals, d_after, d_y, d_x, d_before, d_empty, *, options
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        _store(d_before, _load(d_after))
        _store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    chunk, full, reset = _read(x)
    start = _load(residuals)
    # After the first chunk the two memories are equal, where there are tokens.
    first = pl.program_id(1) == pl.num_programs(1) - 1
    # `residuals` holds one memory a chunk; the running one of the first comes from the
    # caller.
    entering = jax.tree.map(lambda r, s: jnp.where(first, r, s), _load(running), start)

    def advance(chunk, memories, empty) -> Any:
        return one_chunk.advance(chunk, memories, empty, full, reset, options)

    _, vjp = jax.vjp(advance, chunk, Memories(start, entering), _load(empty))
    d_chunk, d_memories, d_fresh = vjp((_load(d_before), d_y[...].astype(F32)))
    _store(d_before, d_memories)
    # Every reset reads `empty`, so that its gradient is a sum over chunks.
    _store(d_empty, jax.tree.map(lambda a, b: a + b, _load(d_empty), d_fresh))
    _store(d_x.q, d_chunk.q)
    _store(d_x.inputs, d_chunk.inputs)
    _store(d_x.alpha, d_chunk.alpha)
    rows = (*d_chunk.gamma, *d_chunk.g)
    for i in range(d_x.gates.shape[1]):
        # Flags have no gradient.
        d_x.gates[:, i, :] = rows[i] if i < len(rows) else jnp.zeros_like(rows[0])
