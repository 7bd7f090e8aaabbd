"""Lattice with chunks of one token on a Hopper GPU, in Mosaic: the exact recurrence.

One program takes a batch element and head through all its tokens in order. Its memory
stays in shared memory, and every product is float32 on CUDA cores. Where a gradient is
taken, the forward kernel also saves the memory every `BLOCK` tokens, and the backward
kernel computes a block again, in groups of tokens, from there. The saved memories and
the reads are named "lattice_chunk_states" and "lattice_reads" for rematerialisation
policies.
"""

from typing import Any

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
from memjax_kernels._src.lattice.segment import Chunks, Memory
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32


def lattice_gpu_exact(
    tokens: Chunks, start: Array, empty: Array, static: Static
) -> tuple[Memory, Array]:
    """A chunk implementation; see `segment`, for C = 1."""
    cleared = tokens.cleared
    # Flags are floats, so that everything has a gradient.
    cleared = None if cleared is None else cleared.astype(F32)
    arguments = (tokens[:4], cleared, start, empty)
    results: Any = _tokens(static, *varying.vary_alike(arguments))
    after, y = results
    b, h = start.shape[:2]
    return (after, jnp.zeros_like(start), jnp.ones((b, h), F32)), y


def _cut(x: Array) -> Array:
    """[B, T, 1, ...] -> [B, n, GROUP, ...]; a token of zeros writes nothing."""
    tail = [(0, 0)] * (x.ndim - 1)
    tail[1] = (0, -x.shape[1] % BLOCK)
    x = jnp.pad(x[:, :, 0], tail)
    return x.reshape(x.shape[0], -1, GROUP, *x.shape[2:])


def _prepared(floats, cleared, start, empty) -> TokenInputs:
    q, k, v, gamma = floats
    gamma = jnp.swapaxes(_cut(gamma.astype(F32)), 2, 3)
    if cleared is not None:
        cleared = _cut((cleared > 0.5).astype(jnp.int32)[..., None])
    return TokenInputs(
        *(_cut(x.astype(F32)) for x in (q, k, v)),
        gamma=jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)]),
        start=start,
        empty=None if cleared is None else empty,
        cleared=cleared,
    )


def _forward(static: Static, *primals, keep: bool):
    y, after, kept = forward(static, _prepared(*primals), keep=keep)
    (_, _, v, _), *_ = primals
    b, time, _, h, width = v.shape
    y = y.reshape(b, -1, 1, h, width)[:, :time].astype(v.dtype)
    return varying.vary_alike((((after, y), kept), primals))[0]


def _backward(static: Static, primals, kept, cotangents):
    d_after, d_y = cotangents
    x, back = gradients.of_prepared(_prepared, ("cleared",), primals)
    d = backward(static, x, kept, _cut(d_y.astype(F32)), d_after)
    gamma = jnp.swapaxes(jnp.sum(d.gamma, axis=-1), 2, 3)
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)])
    return back(TokenInputs(*d._replace(gamma=gamma), cleared=None))


def _in_xla(static: Static, floats, cleared, start, empty):
    complete = jnp.ones(floats[0].shape[:2], bool)
    cleared = None if cleared is None else cleared > 0.5
    tokens = Chunks(*floats, g=None, complete=complete, cleared=cleared)
    (after, _, _), y = lattice_xla(tokens, start, empty, static.rule)
    return after, y


_tokens = gradients.of_kernels("lattice", _forward, _backward, _in_xla)
