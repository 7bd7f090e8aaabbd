"""Lattice with chunks of one token on a Hopper GPU, in Mosaic: the exact recurrence.

One program takes a batch element and head through all its tokens in order. Its memory
stays in shared memory, and every product is float32 on CUDA cores. Where a gradient is
taken, the forward kernel also saves the memory every `BLOCK` tokens, and the backward
kernel computes a block again, in groups of tokens, from there. The saved memories and
the reads are named "lattice_chunk_states" and "lattice_reads" for rematerialisation
policies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from memjax_kernels.lattice.pallas_gpu.exact_backward import backward
from memjax_kernels.lattice.pallas_gpu.exact_forward import forward
from memjax_kernels.lattice.pallas_gpu.inputs import (
    BLOCK,
    GATES,
    GROUP,
    Static,
    TokenInputs,
)
from memjax_kernels.lattice.segment import Chunks, Memory

F32 = jnp.float32


def lattice_gpu_exact(
    tokens: Chunks, start: Array, empty: Array, static: Static
) -> tuple[Memory, Array]:
    """A chunk implementation; see `segment`, for C = 1."""
    b, time, _, h, _ = tokens.q.shape

    def cut(x):
        # [B, T, 1, ...] -> [B, n, GROUP, ...]; a token of zeros writes nothing.
        tail = [(0, 0)] * (x.ndim - 1)
        tail[1] = (0, -time % BLOCK)
        x = jnp.pad(x[:, :, 0], tail)
        return x.reshape(b, -1, GROUP, *x.shape[2:])

    cleared = tokens.cleared
    gamma = jnp.swapaxes(cut(tokens.gamma.astype(F32)), 2, 3)
    x = TokenInputs(
        *(cut(x.astype(F32)) for x in (tokens.q, tokens.k, tokens.v)),
        gamma=jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)]),
        start=start,
        empty=None if cleared is None else empty,
        cleared=None if cleared is None else cut(cleared.astype(jnp.int32)[..., None]),
    )
    results: Any = _tokens(static, x)
    y, after = results
    y = y.reshape(b, -1, 1, h, y.shape[-1])[:, :time].astype(tokens.v.dtype)
    return (after, jnp.zeros_like(start), jnp.ones((b, h), F32)), y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokens(static: Static, x: TokenInputs):
    return forward(static, x, keep=False)[:2]


def _tokens_fwd(static, x):
    y, after, kept = forward(static, x, keep=True)
    kept = checkpoint_name(kept, "lattice_chunk_states")
    return (checkpoint_name(y, "lattice_reads"), after), (x, kept)


def _tokens_bwd(static, residuals, cotangents):
    d = backward(static, *residuals, *cotangents)
    gamma = jnp.swapaxes(jnp.sum(d.gamma, axis=-1), 2, 3)
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, GATES - GROUP)])
    return (TokenInputs(*d._replace(gamma=gamma), cleared=None),)


_tokens.defvjp(_tokens_fwd, _tokens_bwd)
