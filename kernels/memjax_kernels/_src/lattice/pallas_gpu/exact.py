"""Lattice with chunks of one token on a Hopper GPU, in Mosaic: the exact recurrence.

One program takes a batch element and head through all its tokens in order. Its memory
stays in shared memory, and every product is float32 on CUDA cores. Where a gradient is
taken, the forward kernel also saves the memory every `BLOCK` tokens, and the backward
kernel computes a block again, in groups of tokens, from there. The saved memories and
the reads are named "lattice_chunk_states" and "lattice_reads" for rematerialisation
policies.
"""

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import gradients, varying
from memjax_kernels._src.lattice.pallas_gpu.exact_backward import backward
from memjax_kernels._src.lattice.pallas_gpu.exact_forward import forward
from memjax_kernels._src.lattice.pallas_gpu.inputs import (
    BLOCK,
    GATES,
    GROUP,
    Static,
    TokenInputs,
)
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32


def lattice_gpu_exact(
    tokens: Chunks, start: Array, empty: Array, static: Static
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`, for C = 1."""
    reset = tokens.reset
    # Flags are floats, so that everything has a gradient.
    reset = None if reset is None else reset.astype(F32)
    arguments = (tokens[:4], reset, start, empty)
    return _tokens(static, *varying.vary_alike(arguments))


def _cut(x: Array) -> Array:
    """[B, T, 1, ...] -> [B, n, GROUP, ...]; a token of zeros writes nothing."""
    tail = [(0, 0)] * (x.ndim - 1)
    tail[1] = (0, -x.shape[1] % BLOCK)
    x = jnp.pad(x[:, :, 0], tail)
    return x.reshape(x.shape[0], -1, GROUP, *x.shape[2:])


def _prepared(floats, reset, start, empty) -> TokenInputs:
    q, k, v, gamma = floats
    gamma = jnp.swapaxes(_cut(gamma.astype(F32)), 2, 3)
    if reset is not None:
        reset = _cut((reset > 0.5).astype(jnp.int32)[..., None])
    return TokenInputs(
        *(_cut(x.astype(F32)) for x in (q, k, v)),
        gamma=jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)]),
        start=start,
        empty=None if reset is None else empty,
        reset=reset,
    )


def _forward(static: Static, *primals, with_residuals: bool):
    y, after, residuals = forward(
        static, _prepared(*primals), with_residuals=with_residuals
    )
    (_, _, v, _), *_ = primals
    b, time, _, h, width = v.shape
    y = y.reshape(b, -1, 1, h, width)[:, :time].astype(v.dtype)
    return varying.vary_alike((((after, y), residuals), primals))[0]


def _backward(static: Static, primals, residuals, cotangents):
    d_after, d_y = cotangents
    x, back = gradients.of_prepared(_prepared, ("reset",), primals)
    d = backward(static, x, residuals, _cut(d_y.astype(F32)), d_after)
    gamma = jnp.swapaxes(jnp.sum(d.gamma, axis=-1), 2, 3)
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)])
    return back(TokenInputs(*d._replace(gamma=gamma), reset=None))


def _in_xla(static: Static, floats, reset, start, empty):
    full = jnp.ones(floats[0].shape[:2], bool)
    reset = None if reset is None else reset > 0.5
    tokens = Chunks(*floats, g=None, full=full, reset=reset)
    return lattice_xla(tokens, start, empty, static.rule)


_tokens = gradients.of_kernels("lattice", _forward, _backward, _in_xla)
