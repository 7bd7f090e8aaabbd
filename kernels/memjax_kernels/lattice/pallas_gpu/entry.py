"""Lattice on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memory stays in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memory at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"lattice_chunk_states" and "lattice_reads" for rematerialisation policies.

The kernels compile for sm_90a and agree with XLA in the interpreter. They have not run
on a GPU yet, so they must be asked for. Chunks of one token have kernels of their own,
see `exact`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from memjax_kernels.common.mosaic import ROWS
from memjax_kernels.lattice.memory import Rule
from memjax_kernels.lattice.pallas_gpu.backward import backward
from memjax_kernels.lattice.pallas_gpu.exact import lattice_gpu_exact
from memjax_kernels.lattice.pallas_gpu.forward import forward
from memjax_kernels.lattice.pallas_gpu.inputs import ChunkInputs, Static
from memjax_kernels.lattice.segment import Chunks, Memory


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can."""
    dtypes = ("bfloat16", "float32") if chunk_size == 1 else ("bfloat16",)
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.dtype.name not in dtypes:
            return f"{name} must be {' or '.join(dtypes)}, got {array.dtype}"
    if not rule.normalize:
        return "it is written for normalize=True"
    if rule.forget is not None:
        return f"it is written for forget=None, got {rule.forget!r}"
    if chunk_size > 1 and (chunk_size % 8 or chunk_size > ROWS):
        return f"chunk_size must be 1 or a multiple of 8 up to {ROWS}, got {chunk_size}"
    if (q.shape[-1], v.shape[-1]) != (64, 64):
        return f"M and V must be 64, got {q.shape[-1]} and {v.shape[-1]}"
    return ""


def lattice_gpu(
    tokens: Chunks,
    start: Array,
    empty: Array,
    rule: Rule,
    *,
    interpret: Any = None,
) -> tuple[Memory, Array]:
    """A chunk implementation; see `segment`; `interpret` runs it in an interpreter."""
    static = Static(rule.variant, interpret)
    if tokens.q.shape[2] == 1:
        return lattice_gpu_exact(tokens, start, empty, static)
    cleared = tokens.cleared
    if cleared is not None:
        # The first chunk's reset is applied here, so that kernels fetch `empty` for
        # later ones alone.
        start = jnp.where(cleared[:, 0, None, None, None], empty, start)
    gamma = jnp.moveaxis(tokens.gamma.astype(jnp.float32), 2, -1)
    # Padding of rate 0 writes nothing.
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, ROWS - gamma.shape[-1])])
    x = ChunkInputs(
        q=tokens.q,
        k=tokens.k,
        v=tokens.v,
        gamma=gamma,
        start=start,
        empty=None if cleared is None else empty,
        whole=jnp.sum(tokens.complete, axis=1, dtype=jnp.int32),
        cleared=None if cleared is None else cleared.astype(jnp.int32),
    )
    results: Any = _chunks(static, x)
    y, after, pending = results
    return (after, pending, jnp.ones(start.shape[:2], jnp.float32)), y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(static: Static, x: ChunkInputs):
    return forward(static, x, keep=False)[:3]


def _chunks_fwd(static, x):
    y, after, pending, kept = forward(static, x, keep=True)
    kept = checkpoint_name(kept, "lattice_chunk_states")
    return (checkpoint_name(y, "lattice_reads"), after, pending), (x, kept)


def _chunks_bwd(static, residuals, cotangents):
    x, kept = residuals
    return (
        ChunkInputs(*backward(static, x, kept, *cotangents), whole=None, cleared=None),
    )


_chunks.defvjp(_chunks_fwd, _chunks_bwd)
