"""Lattice on a TPU: the memory stays in fast memory (VMEM), forward and backward.

The grid is (blocks of heads, blocks of tokens). Heads of all batch elements run in
parallel, and tokens in order. The memory is an output block that all tokens of a head
share, so it stays in VMEM from the first to the last. The heads of one program do not
depend on each other, which hides latency. A block of tokens is one chunk, computed by
matrix products, or, where C = 1, `BLOCK` tokens one after the other on the vector unit.
Heads that fill registers go through `tpu_packed` and `tpu_token`.

Where a gradient is taken, the forward kernel also saves the memory before every block,
in the dtype of the tokens (C = 1: float32). The backward kernel goes through the blocks
in reverse, computes each again from there and takes its vjp. The saved
memories are named "lattice_chunk_states" and the reads "lattice_reads": with a
rematerialisation policy that saves both, the forward kernel runs once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels._src.common import gradients, varying
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.lattice import tpu_kernels, tpu_packed, tpu_token
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.tpu_kernels import Inputs
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32
# Bytes of blocks that a program may hold, and what Mosaic is allowed beside them.
BLOCK_BYTES = 12 << 20
VMEM_BYTES = 64 << 20
# Heads of a program, and tokens of a block where C = 1.
HEADS = 8
BLOCK = 16
# The largest chunk whose matrices [C, C] fit.
CHUNK = 512


class Static(NamedTuple):
    """Static arguments of the kernels; `exact` is C = 1."""

    rule: Rule
    exact: bool
    heads: int
    interpret: Any


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    tokens = {x.dtype.name for x in (q, k, v)}
    if len(tokens) > 1 or not tokens <= {"float32", "bfloat16"}:
        return f"q, k and v must all be float32 or all bfloat16, got {sorted(tokens)}"
    if not rule.normalize:
        return "it is written for normalize=True"
    if rule.forget is not None:
        return f"it is written for forget=None, got {rule.forget!r}"
    if chunk_size > CHUNK:
        return f"chunk_size must be at most {CHUNK}, got {chunk_size}"
    (_, time, _, slots), width = q.shape, v.shape[-1]
    exact = chunk_size == 1
    need = _head_bytes(min(BLOCK, time) if exact else chunk_size, slots, width, exact)
    if need > VMEM_BYTES:
        return (
            f"a head's blocks take {need / 2**20:.1f} MiB of VMEM, more than "
            f"{VMEM_BYTES / 2**20:.0f}"
        )
    return ""


def lattice_tpu(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`; `interpret` as in `pallas_call`."""
    if tpu_packed.fits(tokens):
        packed = tpu_packed.lattice_packed
        return packed(tokens, start, empty, rule, interpret=interpret)
    if tpu_token.fits(tokens):
        by_token = tpu_token.lattice_tokens
        return by_token(tokens, start, empty, rule, interpret=interpret)
    b, n, c, h, m = tokens.q.shape
    width = start.shape[-1]
    exact = c == 1
    block = min(BLOCK, n) if exact else c

    def in_blocks(x: Array) -> Array:
        # [B, n, C, H, D] -> [G, blocks, tokens, D]; tokens of zeros fill the last.
        x = jnp.moveaxis(x, 3, 1).reshape(b * h, n * c, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, -n * c % block), (0, 0)))
        # Single tokens are computed on the vector unit, in float32.
        return x.astype(F32 if exact else x.dtype).reshape(
            b * h, -1, block, x.shape[-1]
        )

    flags = (None if exact else tokens.full, tokens.reset)

    def each(f):
        return jnp.broadcast_to(f.astype(F32)[:, :, None, None], (b, n, c, h))

    gates = [tokens.gamma.astype(F32), *(each(f) for f in flags if f is not None)]
    # Gates and flags are one array, so that the kernel takes one small block for all.
    rows = in_blocks(jnp.stack(gates, axis=-1))
    inputs = Inputs(
        in_blocks(tokens.q),
        in_blocks(tokens.k),
        in_blocks(tokens.v),
        gates=rows if exact else rows.swapaxes(2, 3),
    )
    static = Static(rule, exact, _heads(inputs, exact), interpret)

    def flat(x):
        return x.reshape(b * h, m, width)

    arguments = varying.vary_alike((inputs, flat(start), flat(empty)))
    result: Any = _blocks(static, *arguments)
    after, y = result
    y = y.reshape(b, h, -1, width)[:, :, : n * c].reshape(b, h, n, c, width)
    after = after.reshape(b, h, m, width)
    return after, jnp.moveaxis(y, 1, 3).astype(tokens.v.dtype)


def _heads(x: Inputs, exact: bool) -> int:
    """Heads per program: as many as keep the backward kernel's blocks in VMEM."""
    heads, _, block, slots = x.q.shape
    fits = BLOCK_BYTES // _head_bytes(block, slots, x.v.shape[-1], exact)
    return max(1, min(HEADS, heads, fits))


def _head_bytes(block: int, slots: int, width: int, exact: bool) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""

    def lanes(size):
        return -(-size // 128) * 128

    # Tokens with their gradients; memories before and after with theirs, and, where
    # C = 1, before every token of the block.
    tokens = 4 * block * (2 * lanes(slots) + lanes(width))
    memories = (10 + (block if exact else 0)) * slots * lanes(width)
    squares = 0 if exact else 8 * block * lanes(block)
    return 4 * (tokens + memories + squares)


def _forward(static: Static, x: Inputs, start, empty, *, with_residuals: bool):
    like = functools.partial(varying.like, x.q)
    y = like(x.v.shape, x.v.dtype)
    shape = (start.shape[0], x.q.shape[1], *start.shape[1:])
    residuals = like(shape, x.q.dtype) if with_residuals else None
    after = like(start.shape, F32)
    block, whole = _specs(static.heads, lambda i: i)
    after, y, residuals = _call(
        static,
        tpu_kernels.token_forward if static.exact else tpu_kernels.chunk_forward,
        "forward",
        (x, start, empty),
        (block(x), whole(start), whole(empty)),
        (after, y, residuals),
        (whole(after), block(y), block(residuals)),
        [],
    )
    return (after, y), residuals


def _backward(static: Static, primals, residuals, cotangents):
    # The memory before the first block is the first of the residuals.
    x, _, empty = primals
    d_after, d_y = cotangents
    n = x.q.shape[1]
    like = functools.partial(varying.like_tree, x.q)
    block, whole = _specs(static.heads, lambda i: n - 1 - i)
    # Where C = 1, the memories before every token of a block.
    shape = (x.q.shape[2], static.heads, *empty.shape[1:])
    return _call(
        static,
        tpu_kernels.token_backward if static.exact else tpu_kernels.chunk_backward,
        "backward",
        (x, empty, residuals, d_after, d_y),
        (block(x), whole(empty), block(residuals), whole(d_after), block(d_y)),
        (like(x), like(empty), like(empty)),
        (block(x), whole(empty), whole(empty)),
        [pltpu.VMEM(shape, F32)] if static.exact else [],
    )


def _in_xla(static: Static, x: Inputs, start, empty):
    """The function of the forward kernel, each head as a batch element."""
    if static.exact:
        # A block is as many chunks of one token.
        def in_chunks(x):
            return x.reshape(x.shape[0], -1, 1, x.shape[-1])

        gates = in_chunks(x.gates)
        flags = [jnp.ones(gates.shape[:2], bool)]
    else:

        def in_chunks(x):
            return x

        gates = x.gates.swapaxes(2, 3)
        flags = []
    flags += [gates[:, :, 0, i] > 0.5 for i in range(1, gates.shape[-1])]

    def one_head(x):
        return in_chunks(x)[:, :, :, None]

    tokens = Chunks(
        q=one_head(x.q),
        k=one_head(x.k),
        v=one_head(x.v),
        gamma=gates[..., :1],
        g=None,
        full=flags[0],
        reset=flags[1] if len(flags) > 1 else None,
    )
    after, y = lattice_xla(tokens, start[:, None], empty[:, None], static.rule)
    return after[:, 0], y.reshape(x.v.shape)


_blocks = gradients.of_kernels("lattice", _forward, _backward, _in_xla)


def _specs(heads, order):
    """Specs of trees of [G, n, ., .] by block in `order`, of [G, ., .] for them all."""

    def block(x):
        return pl.BlockSpec(
            (heads, None, *x.shape[2:]), lambda g, i: (g, order(i), 0, 0)
        )

    def whole(x):
        return pl.BlockSpec((heads, *x.shape[1:]), lambda g, i: (g, 0, 0))

    return functools.partial(jax.tree.map, block), functools.partial(
        jax.tree.map, whole
    )


def _call(static: Static, kernel, name, inputs, in_specs, outputs, out_specs, scratch):
    x = inputs[0]
    options: dict[str, Any] = {"rule": static.rule}
    if not static.exact:
        options["multiply"] = multiplier(operand_dtype(x.q))
    form = "token" if static.exact else "chunk"
    return pl.pallas_call(
        functools.partial(kernel, **options),
        grid=(pl.cdiv(x.q.shape[0], static.heads), x.q.shape[1]),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            # Heads do not depend on each other; a block needs the memory that the one
            # before left.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=static.interpret,
        name=f"lattice_{form}_{name}",
    )(*inputs)
