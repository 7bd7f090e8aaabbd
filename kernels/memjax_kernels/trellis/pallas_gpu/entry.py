"""Trellis on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memories stay in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memories at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"trellis_chunk_states" and "trellis_reads" for rematerialisation policies. Where the
backward kernel does not fit into shared memory (`has_backward`), gradients are those of
the XLA implementation, which computes the chunks again from the first.

The kernels compile for sm_90a and agree with the token loop in the interpreter. They
have not run on a GPU yet, so they must be asked for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from memjax_kernels.common.mosaic import ROWS
from memjax_kernels.trellis.pallas_gpu.backward import backward
from memjax_kernels.trellis.pallas_gpu.forward import forward
from memjax_kernels.trellis.pallas_gpu.inputs import (
    GAMMA,
    LAST,
    SHARED_BYTES,
    TOTAL,
    Inputs,
    Sizes,
    Static,
    forward_bytes,
    has_backward,
    memories_after,
    prepare,
)
from memjax_kernels.trellis.segment import Tokens
from memjax_kernels.trellis.state import Memories
from memjax_kernels.trellis.xla import trellis_xla


def trellis_gpu(
    tokens: Tokens,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = None,
) -> tuple[Memories, Array]:
    """A chunk implementation; see `segment`. `interpret` runs it in an interpreter."""
    _, n, size, _, key_dim = tokens.q.shape
    sizes = Sizes(n, size, tokens.alpha.shape[-1], (key_dim, tokens.v.shape[-1]))
    # Two stages copy the next chunk's tokens during the computation, if they fit.
    stages = 2 if forward_bytes(sizes, 2) <= SHARED_BYTES else 1
    static = Static(phi, activation, stages, interpret)
    # The very same arrays: every batch element starts a chunk.
    aligned = all(a is b for a, b in zip(memories.start, memories.running, strict=True))
    if not has_backward(sizes, aligned):
        return _forward_only(static, aligned, tokens, memories, empty)
    x = prepare(tokens, memories, empty, aligned)
    results: Any = _chunks(static, x)
    y, after, middle = results
    return memories_after(x, after, middle), y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(static: Static, x: Inputs):
    return forward(static, x, keep=False)[:3]


def _chunks_fwd(static, x):
    y, after, middle, kept = forward(static, x, keep=True)
    kept = checkpoint_name(kept, "trellis_chunk_states")
    y = checkpoint_name(y, "trellis_reads")
    return (y, after, middle), (x, kept)


def _chunks_bwd(static, residuals, cotangents):
    x, kept = residuals
    d = backward(static, x, kept, *cotangents)
    rows = d.gates.reshape(*d.gates.shape[:3], 2, 3, ROWS)
    last = jnp.sum(rows[..., LAST, :], axis=-1) + jnp.sum(d.last, axis=-1)
    # The kernels take the last sum from the last of their rows.
    total = rows[..., TOTAL, :].at[..., -1].add(last)
    gates = jnp.stack([total, rows[..., GAMMA, :]], axis=-2)
    return (
        Inputs(
            q=d.q,
            inputs=d.inputs,
            alpha=d.alpha,
            gates=gates.reshape(x.gates.shape),
            begin=d.begin,
            running=d.running,
            empty=d.empty,
            middle=None,
            cleared=None,
        ),
    )


_chunks.defvjp(_chunks_fwd, _chunks_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forward_only(static, aligned, tokens, memories, empty):
    x = prepare(tokens, memories, empty, aligned)
    y, after, middle, _ = forward(static, x, keep=False)
    return memories_after(x, after, middle), y


def _forward_only_fwd(static, aligned, *arguments):
    return _forward_only(static, aligned, *arguments), arguments


def _forward_only_bwd(static, aligned, arguments, cotangents):
    tokens, memories, empty = arguments
    options = {"phi": static.phi, "activation": static.activation}
    # Flags are no floats, and have no gradient.
    floats = {name: getattr(tokens, name) for name in Tokens._fields[:6]}

    def again(floats, memories, empty):
        return trellis_xla(tokens._replace(**floats), memories, empty, **options)

    floats, memories, empty = jax.vjp(again, floats, memories, empty)[1](cotangents)
    return Tokens(**floats, complete=None, cleared=None), memories, empty


_forward_only.defvjp(_forward_only_fwd, _forward_only_bwd)
