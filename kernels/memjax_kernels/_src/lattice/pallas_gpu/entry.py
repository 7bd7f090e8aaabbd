"""Lattice on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memory stays in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memory at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"lattice_chunk_states" and "lattice_reads" for rematerialisation policies.

On an H200 they agree with the token loop as the XLA form in bfloat16 does; see
`experiments/speed`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import gradients, varying
from memjax_kernels._src.common.mosaic import ROWS
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.pallas_gpu.backward import backward
from memjax_kernels._src.lattice.pallas_gpu.forward import forward
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs, Static
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.xla import lattice_xla


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can."""
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.dtype.name != "bfloat16":
            return f"{name} must be bfloat16, got {array.dtype}"
    if not rule.normalize:
        return f"normalize must be True, got {rule.normalize}"
    if rule.forget is not None:
        return f"forget must be None, got {rule.forget!r}"
    if chunk_size % 8 or chunk_size > ROWS:
        return f"chunk_size must be a multiple of 8 up to {ROWS}, got {chunk_size}"
    if (q.shape[-1], v.shape[-1]) != (64, 64):
        return f"M and V must be 64, got {q.shape[-1]} and {v.shape[-1]}"
    return ""


def lattice_gpu(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = None
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`; `interpret` runs it in an interpreter."""
    static = Static(rule, interpret)

    # Flags are floats, so that everything has a gradient.
    def as_floats(flags):
        return jax.tree.map(lambda x: x.astype(jnp.float32), flags)

    arguments = (tokens[:4], as_floats(tokens[5:]), start, empty)
    return _chunks(static, *varying.vary_alike(arguments))


def _prepared(floats, flags, start, empty) -> ChunkInputs:
    q, k, v, gamma = floats
    full, reset = jax.tree.map(lambda x: x > 0.5, flags)
    if reset is not None:
        # The first chunk's reset is applied here, so that kernels fetch `empty` for
        # later ones alone.
        start = jnp.where(reset[:, 0, None, None, None], empty, start)
    gamma = jnp.moveaxis(gamma.astype(jnp.float32), 2, -1)
    return ChunkInputs(
        q=q,
        k=k,
        v=v,
        # Padding of rate 0 writes nothing.
        gamma=jnp.pad(gamma, [(0, 0)] * 3 + [(0, ROWS - gamma.shape[-1])]),
        start=start,
        empty=None if reset is None else empty,
        whole=jnp.sum(full, axis=1, dtype=jnp.int32),
        reset=None if reset is None else reset.astype(jnp.int32),
    )


def _forward(static: Static, *primals, with_residuals: bool):
    y, after, residuals = forward(
        static, _prepared(*primals), with_residuals=with_residuals
    )
    return varying.vary_alike((((after, y), residuals), primals))[0]


def _backward(static: Static, primals, residuals, cotangents):
    d_after, d_y = cotangents
    x, back = gradients.of_prepared(_prepared, ("whole", "reset"), primals)
    d = backward(static, x, residuals, d_y, d_after)
    return back(ChunkInputs(*d, whole=None, reset=None))


def _in_xla(static: Static, floats, flags, start, empty):
    full, reset = jax.tree.map(lambda x: x > 0.5, flags)
    tokens = Chunks(*floats, g=None, full=full, reset=reset)
    return lattice_xla(tokens, start, empty, static.rule)


_chunks = gradients.of_kernels("lattice", _forward, _backward, _in_xla)
