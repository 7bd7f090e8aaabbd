"""Trellis on a TPU: one kernel forward, one backward, memories in fast memory (VMEM).

Heads that `tpu_packed.fits` go through the kernels there, which take a third of the
cycles. Those of this file take all other sizes: chunks that neither divide 16 tokens
nor are a multiple of them, an odd number of heads, and channels or slots that are no
multiple of 64.

The grid is (blocks of heads, chunks). Heads of all batch elements run in parallel, and
chunks in order. The memories are output blocks that all chunks of a head share, so
they stay in VMEM from the first chunk to the last. The heads of one program do not
depend on each other, which hides latency.

Where a gradient is taken, the forward kernel also saves the memories at every chunk's
start, in the dtype of the tokens. The backward kernel goes through the chunks in
reverse, computes each again from there and takes its vjp. The saved
memories and the reads are named "trellis_chunk_states" and "trellis_reads": with a
rematerialisation policy that saves both, the forward kernel runs once.

They take 2 M (K + V) / C bytes a token and head in bfloat16, so that small chunks are
for short segments: with C = 1 they are as large as the memories of all tokens. Those of
`tpu_small` take M (K + V) / 4, one memory per 16 tokens, in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels._src.common import gradients, products, varying
from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis import tpu_kernels, tpu_packed, tpu_small
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.tpu_kernels import Inputs
from memjax_kernels._src.trellis.xla import trellis_xla

F32 = jnp.float32
# What the blocks of a program may take by `_block_bytes`, and what Mosaic may take.
BLOCK_BYTES = 40 << 20
VMEM_BYTES = 48 << 20
# Heads of one program, where they fit.
HEADS = 8


class Static(NamedTuple):
    """Static arguments of the kernels."""

    phi: str
    activation: str
    heads: int
    interpret: Any


def unsupported(q: Array, k: Array, v: Array, alpha: Array, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    kinds = {x.dtype.name for x in (q, k, v)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        return f"q, k and v must all be float32 or all bfloat16, got {sorted(kinds)}"
    if alpha.dtype.name not in ("float32", "bfloat16"):
        return f"alpha must be float32 or bfloat16, got {alpha.dtype}"
    needed = _block_bytes(chunk_size, q.shape[-1], v.shape[-1], alpha.shape[-1])
    if needed > BLOCK_BYTES:
        return (
            f"a head's blocks take {needed / 2**20:.1f} MiB of VMEM, more than "
            f"{BLOCK_BYTES / 2**20:.0f}"
        )
    return ""


def trellis_tpu(
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`.

    `interpret` is that of `pallas_call`: False, or `pltpu.InterpretParams`.
    """
    given: Any = (tokens, memory, empty)
    options: Any = dict(phi=phi, activation=activation, interpret=interpret)
    if tpu_small.fits(tokens):
        return tpu_small.trellis_small(*given, **options)
    if tpu_packed.fits(tokens):
        return tpu_packed.trellis_packed(*given, **options)
    b, n, c, h, key_dim = tokens.q.shape
    full = jnp.ones((b, n), bool) if tokens.full is None else tokens.full

    # [B, n, C, H, D] -> [G, n, C, D], and back.
    def heads_first(x):
        return jnp.moveaxis(x, 3, 1).reshape(b * h, n, c, x.shape[-1])

    def back(x):
        return jnp.moveaxis(x.reshape(b, h, n, c, x.shape[-1]), 1, 3)

    def flat(x):
        return x.reshape(b * h, *x.shape[2:])

    flags = [f for f in (full, tokens.reset) if f is not None]
    # Flags travel as further rows of the gates: one small block instead of three.
    wide = [
        jnp.broadcast_to(f.astype(F32)[:, :, None, None, None], (b, n, c, h, 1))
        for f in flags
    ]

    def for_both(gate):
        return jnp.broadcast_to(gate, (b, n, c, h, 2))

    gates = [for_both(tokens.gamma), for_both(tokens.g), *wide]
    gates = heads_first(jnp.concatenate(gates, axis=-1))
    arranged = Inputs(
        heads_first(tokens.q),
        (heads_first(tokens.k), heads_first(tokens.v)),
        heads_first(tokens.alpha),
        gates.swapaxes(2, 3),
    )
    needed = _block_bytes(c, key_dim, tokens.v.shape[-1], tokens.alpha.shape[-1])
    # As many heads as fit: they are independent, and one hides the latency of another.
    heads = max(1, min(HEADS, b * h, BLOCK_BYTES // needed))
    static = Static(phi, activation, heads, interpret)
    flatten = functools.partial(jax.tree.map, flat)
    arguments = varying.vary_alike((arranged, flatten(memory), flatten(empty)))
    results: Any = _chunks(static, *arguments)
    memory, y = results
    return jax.tree.map(lambda x: x.reshape(b, h, *x.shape[1:]), memory), back(y)


def _block_bytes(size: int, key_dim: int, value_dim: int, slots: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""

    # In float32 with rows of whole lanes. Two buffers of each array in and out, and the
    # values in between: 16 and 8 of a memory, 4 of a token's array, 12 matrices of a
    # token's slots and 8 squares of a chunk in each pass.
    # VMEM pads rows to whole lanes of 128.
    def lanes(width):
        return -(-width // 128) * 128

    widths = (key_dim, value_dim)
    tokens = 4 * size * sum(map(lanes, (key_dim, *widths, slots)))
    memories = 24 * slots * sum(map(lanes, widths))
    between = 2 * size * (12 * lanes(slots) + 8 * lanes(size))
    return 4 * (tokens + memories + between)


def _forward(static: Static, x: Inputs, memory, empty, *, with_residuals: bool):
    like = functools.partial(varying.like, x.q)
    y = like(x.inputs[1].shape, x.inputs[1].dtype)
    # In the tokens' dtype, to which the operands of products are rounded anyway.
    residuals = (
        jax.tree.map(
            lambda m: like((m.shape[0], x.q.shape[1], *m.shape[1:]), x.q.dtype),
            memory,
        )
        if with_residuals
        else None
    )
    after = jax.tree.map(lambda m: like(m.shape, F32), memory)
    specs = functools.partial(_specs, static.heads, lambda i: i)
    after, y, residuals = _call(
        static,
        tpu_kernels.forward_kernel,
        "trellis_forward",
        (x, memory, empty),
        (specs(x, 4), specs(memory, 3), specs(empty, 3)),
        (after, y, residuals),
        (specs(after, 3), specs(y, 4), specs(residuals, 4)),
    )
    return (after, y), residuals


def _backward(static: Static, primals, residuals, cotangents):
    x, memory, empty = primals
    d_after, d_y = cotangents
    n = x.q.shape[1]
    like = functools.partial(varying.like_tree, x.q)
    # The backward pass goes through the chunks in reverse.
    specs = functools.partial(_specs, static.heads, lambda i: n - 1 - i)
    before, emptied = like(memory), like(empty)
    return _call(
        static,
        tpu_kernels.backward_kernel,
        "trellis_backward",
        (x, empty, residuals, d_after, d_y),
        (
            specs(x, 4),
            specs(empty, 3),
            specs(residuals, 4),
            specs(d_after, 3),
            specs(d_y, 4),
        ),
        (like(x), before, emptied),
        (specs(x, 4), specs(before, 3), specs(emptied, 3)),
    )


def _in_xla(static: Static, x: Inputs, memory, empty):
    """The function of the forward kernel, each head as a batch element."""

    def one_head(x):
        return x[:, :, :, None]

    gates = one_head(x.gates.swapaxes(2, 3))
    flags = [x.gates[:, :, i, 0] > 0.5 for i in range(4, x.gates.shape[2])]
    tokens = Tokens(
        q=one_head(x.q),
        k=one_head(x.inputs[0]),
        v=one_head(x.inputs[1]),
        alpha=one_head(x.alpha),
        gamma=gates[..., :2],
        g=gates[..., 2:4],
        full=flags[0],
        reset=flags[1] if len(flags) > 1 else None,
    )

    def of_head(tree):
        return jax.tree.map(lambda m: m[:, None], tree)

    after, y = trellis_xla(
        tokens,
        of_head(memory),
        of_head(empty),
        phi=static.phi,
        activation=static.activation,
    )
    return jax.tree.map(lambda m: m[:, 0], after), y[:, :, :, 0]


_chunks = gradients.of_kernels("trellis", _forward, _backward, _in_xla)


def _specs(heads, order, tree, axes):
    """Blocks of a program: [G, n, ., .] by chunk in `order`, [G, ., .] for them all."""

    def spec(x):
        if axes == 4:
            return pl.BlockSpec(
                (heads, None, *x.shape[2:]), lambda g, i: (g, order(i), 0, 0)
            )
        return pl.BlockSpec((heads, *x.shape[1:]), lambda g, i: (g, 0, 0))

    return jax.tree.map(spec, tree)


def _call(static: Static, kernel, name, inputs, in_specs, outputs, out_specs):
    q = inputs[0].q
    multiply = products.multiplier(products.operand_dtype(q))
    options = one_chunk.Options(static.phi, static.activation, multiply)
    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(pl.cdiv(q.shape[0], static.heads), q.shape[1]),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            # Heads do not depend on each other; a chunk needs the memory that the one
            # before left.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=static.interpret,
        name=name,
    )(*inputs)
