"""Trellis on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memories stay in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memories at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"trellis_chunk_states" and "trellis_reads" for rematerialisation policies. Where the
backward kernel does not fit into shared memory (`has_backward`), gradients are those of
the XLA implementation, which computes the chunks again from the first.

On an H200 they agree with the token loop as the XLA form in bfloat16 does; see
`experiments/speed`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import gradients, varying
from memjax_kernels._src.common.mosaic import ROWS
from memjax_kernels._src.trellis.pallas_gpu.backward import backward
from memjax_kernels._src.trellis.pallas_gpu.forward import forward
from memjax_kernels._src.trellis.pallas_gpu.inputs import (
    GAMMA,
    LAST,
    SHARED_BYTES,
    TOTAL,
    Inputs,
    Sizes,
    Static,
    forward_bytes,
    has_backward,
    prepare,
)
from memjax_kernels._src.trellis.segment import Tokens, with_bounded_steps
from memjax_kernels._src.trellis.xla import trellis_xla


def trellis_gpu(
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    bound_steps: bool = False,
    interpret: Any = None,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`. `interpret` runs it in an interpreter."""
    if bound_steps:
        tokens = with_bounded_steps(tokens)
    _, n, size, _, key_dim = tokens.q.shape
    sizes = Sizes(n, size, tokens.alpha.shape[-1], (key_dim, tokens.v.shape[-1]))
    # Two stages copy the next chunk's tokens during the computation, if they fit.
    stages = 2 if forward_bytes(sizes, 2) <= SHARED_BYTES else 1
    static = Static(phi, activation, stages, interpret)

    # Flags are floats, so that everything has a gradient.
    def as_floats(flags):
        return jax.tree.map(lambda x: x.astype(jnp.float32), flags)

    arguments = (tokens[:6], as_floats(tokens[6:]), memory, empty)
    results: Any = _chunks(static, *varying.vary_alike(arguments))
    return results


def _tokens(floats, flags) -> Tokens:
    return Tokens(*floats, *jax.tree.map(lambda x: x > 0.5, flags))


def _prepared(floats, flags, memory, empty) -> Inputs:
    return prepare(_tokens(floats, flags), memory, empty)


def _forward(static: Static, *primals, with_residuals: bool):
    x = _prepared(*primals)
    with_residuals = with_residuals and has_backward(x.sizes)
    y, after, residuals = forward(static, x, with_residuals=with_residuals)
    return varying.vary_alike((((after, y), residuals), primals))[0]


def _backward(static: Static, primals, residuals, cotangents):
    d_after, d_y = cotangents
    x, back = gradients.of_prepared(_prepared, ("whole", "reset"), primals)
    if not has_backward(x.sizes):
        return jax.vjp(functools.partial(_in_xla, static), *primals)[1](cotangents)
    return back(_kernel_gradients(x, backward(static, x, residuals, d_y, d_after)))


def _kernel_gradients(x: Inputs, d) -> Inputs:
    """The backward kernel's gradients as those of its inputs."""
    rows = d.gates.reshape(*d.gates.shape[:3], 2, 3, ROWS)
    last = jnp.sum(rows[..., LAST, :], axis=-1) + jnp.sum(d.last, axis=-1)
    # The kernels take the last sum from the last of their rows.
    total = rows[..., TOTAL, :].at[..., -1].add(last)
    gates = jnp.stack([total, rows[..., GAMMA, :]], axis=-2)
    return Inputs(
        q=d.q,
        inputs=d.inputs,
        alpha=d.alpha,
        gates=gates.reshape(x.gates.shape),
        start=d.start,
        empty=d.empty,
        whole=None,
        reset=None,
    )


def _in_xla(static: Static, floats, flags, memory, empty):
    options: dict[str, Any] = {"phi": static.phi, "activation": static.activation}
    return trellis_xla(_tokens(floats, flags), memory, empty, **options)


_chunks = gradients.of_kernels("trellis", _forward, _backward, _in_xla)
