"""The two kernels of Trellis on a TPU: one chunk of a few heads, forward and backward.

Each of them takes references to blocks in VMEM. `before` holds the memories at the
start of the first chunk. `after` and `d_before` are output blocks that all chunks of a
head share: they hold the memories, or their cotangents, between chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis.state import TrellisTokens

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
    """The chunk of an `Inputs` of references: q, the other tokens, and its flags."""
    rows = [x.gates[:, i, :] for i in range(x.gates.shape[1])]
    k, v = (ref[...] for ref in x.inputs)
    chunk = TrellisTokens(k, v, x.alpha[...], *rows[:4])
    return x.q[...], chunk, [row[:, :1][:, :, None] for row in rows[4:]]


def _advance(q, chunk, memory, empty, flags, options):
    """`chunk.advance` by flags [., 1, 1]: full, and reset if resets were given."""

    def choose(flag, new, old):
        return jax.tree.map(
            lambda a, b: jnp.where(jnp.broadcast_to(flag, a.shape) > 0.5, a, b),
            new,
            old,
        )

    full, *reset = flags
    if reset:
        memory = choose(reset[0], empty, memory)
    after, y = one_chunk.advance(q, chunk, memory, options)
    # A chunk that stays open leaves the memories at its start.
    return choose(full, after, memory), y


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

    memory = _load(after)
    if residuals is not None:
        _store(residuals, memory)
    q, chunk, flags = _read(x)
    memory, read = _advance(q, chunk, memory, _load(empty), flags, options)
    _store(after, memory)
    _store(y, read)


def backward_kernel(
    x, empty, residuals, d_after, d_y, d_x, d_before, d_empty, *, options
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        _store(d_before, _load(d_after))
        _store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    q, chunk, flags = _read(x)

    def advance(q, chunk, memory, empty) -> Any:
        return _advance(q, chunk, memory, empty, flags, options)

    _, vjp = jax.vjp(advance, q, chunk, _load(residuals), _load(empty))
    d_q, d, d_memory, d_fresh = vjp((_load(d_before), d_y[...].astype(F32)))
    _store(d_before, d_memory)
    # Every reset reads `empty`, so that its gradient is a sum over chunks.
    _store(d_empty, jax.tree.map(lambda a, b: a + b, _load(d_empty), d_fresh))
    _store((d_x.q, *d_x.inputs, d_x.alpha), (d_q, d.k, d.v, d.alpha))
    rows = d[3:]
    for i in range(d_x.gates.shape[1]):
        # Flags have no gradient.
        d_x.gates[:, i, :] = rows[i] if i < len(rows) else jnp.zeros_like(rows[0])
