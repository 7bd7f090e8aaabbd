"""Trellis on a TPU: both passes in one kernel, memories in VMEM, a backward kernel.

The grid is (blocks of heads, chunks): heads of all rows in parallel, chunks in order.
The memories are output blocks that all chunks of a head share, so that they stay in
VMEM from the first to the last. Heads of one program are independent chains, which
hides the latency of each. The forward pass for a gradient also keeps the memories at
every chunk's start, in the dtype of the tokens; the backward kernel goes through the
chunks in reverse, computes each again from there and pulls cotangents through it.
These memories and the reads are named "trellis_chunk_states" and "trellis_reads": a
rematerialisation policy that saves both runs the forward kernel once.

They take 2 M (K + V) / C bytes a token and head in bfloat16, so that small chunks are
for short segments: with C = 1 they are as large as the memories of all tokens.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels.common import products, varying
from memjax_kernels.trellis import chunk as one_chunk
from memjax_kernels.trellis.segment import Tokens
from memjax_kernels.trellis.state import Memories

F32 = jnp.float32
# What the blocks of a program may take by `_block_bytes`, and what Mosaic may take.
BLOCK_BYTES = 40 << 20
VMEM_BYTES = 48 << 20
# Heads of one program, where they fit.
HEADS = 8


class Inputs(NamedTuple):
    """Tokens as the kernels take them, G = B H; a tuple holds one for each pass.

    Attributes:
        q: [G, n, C, K].
        inputs: [G, n, C, K], [G, n, C, V].
        alpha: [G, n, C, M].
        gates: [G, n, R, C] float32: gamma of each pass, g of each pass, complete,
            and cleared if resets were given.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any


class Static(NamedTuple):
    """What is fixed when a kernel is compiled."""

    phi: str
    activation: str
    heads: int
    interpret: Any


def unsupported(tokens: Tokens, memories: Memories) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    kinds = {x.dtype.name for x in (tokens.q, tokens.k, tokens.v)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        return f"q, k and v must all be float32 or all bfloat16, got {sorted(kinds)}"
    if tokens.alpha.dtype.name not in ("float32", "bfloat16"):
        return f"alpha must be float32 or bfloat16, got {tokens.alpha.dtype}"
    needed = _block_bytes(tokens, memories)
    if needed > BLOCK_BYTES:
        return (
            f"a head's blocks take {needed / 2**20:.1f} MiB of VMEM, more than "
            f"{BLOCK_BYTES / 2**20:.0f}"
        )
    return ""


def trellis_tpu(
    tokens: Tokens,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[Memories, Array]:
    """A chunk implementation; see `segment`.

    Args:
        tokens: as there.
        memories: as there.
        empty: as there.
        phi: as there.
        activation: as there.
        interpret: as in `pallas_call`: False, or `pltpu.InterpretParams`.
    """
    b, n, c, h, _ = tokens.q.shape
    # [B, n, C, H, D] -> [G, n, C, D], and back.
    lead = lambda x: jnp.moveaxis(x, 3, 1).reshape(b * h, n, c, x.shape[-1])
    back = lambda x: jnp.moveaxis(x.reshape(b, h, n, c, x.shape[-1]), 1, 3)
    flat = lambda x: x.reshape(b * h, *x.shape[2:])
    flags = [f for f in (tokens.complete, tokens.cleared) if f is not None]
    wide = [
        jnp.broadcast_to(f.astype(F32)[:, :, None, None, None], (b, n, c, h, 1))
        for f in flags
    ]
    gates = lead(jnp.concatenate([tokens.gamma, tokens.g, *wide], axis=-1))
    arranged = Inputs(
        lead(tokens.q),
        (lead(tokens.k), lead(tokens.v)),
        lead(tokens.alpha),
        gates.swapaxes(2, 3),
    )
    fitting = BLOCK_BYTES // _block_bytes(tokens, memories)
    heads = max(1, min(HEADS, b * h, fitting))
    static = Static(phi, activation, heads, interpret)
    flatten = lambda tree: jax.tree.map(flat, tree)
    arguments = varying.vary_alike((arranged, flatten(memories), flatten(empty)))
    after: Any = _chunks(static, *arguments)
    memories, y = after
    apart = lambda x: x.reshape(b, h, *x.shape[1:])
    return jax.tree.map(apart, memories), back(y)


def _block_bytes(tokens: Tokens, memories: Memories) -> int:
    """What the backward kernel holds in VMEM for a head, roughly.

    In float32 with rows of whole lanes. Two buffers of each array in and out, and the
    values in between: 16 and 8 of a memory, 4 of a token's array, 12 matrices of a
    token's slots and 8 squares of a chunk in each pass.
    """
    lanes = lambda width: -(-width // 128) * 128
    size, slots = tokens.q.shape[2], tokens.alpha.shape[-1]
    arrays = (tokens.q, tokens.k, tokens.v, tokens.alpha)
    rows = 4 * sum(size * lanes(x.shape[-1]) for x in arrays)
    held = 24 * sum(m.shape[2] * lanes(m.shape[3]) for m in memories.start)
    between = 2 * size * (12 * lanes(slots) + 8 * lanes(size))
    return 4 * (rows + held + between)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(static: Static, x: Inputs, memories: Memories, empty):
    memories, y, _ = _forward(static, x, memories, empty, keep=False)
    return memories, y


def _chunks_fwd(static, x, memories, empty):
    after, y, kept = _forward(static, x, memories, empty, keep=True)
    kept = checkpoint_name(kept, "trellis_chunk_states")
    y = checkpoint_name(y, "trellis_reads")
    return (after, y), (x, memories.running, empty, kept)


def _chunks_bwd(static, residuals, cotangents):
    x, running, empty, kept = residuals
    return _backward(static, x, running, empty, kept, *cotangents)


_chunks.defvjp(_chunks_fwd, _chunks_bwd)


def _read(x: Inputs):
    """The chunk of an `Inputs` of references, and its flags."""
    rows = [x.gates[:, i, :] for i in range(x.gates.shape[1])]
    flags = [row[:, :1][:, :, None] for row in rows[4:]]
    chunk = one_chunk.Chunk(
        x.q[...],
        (x.inputs[0][...], x.inputs[1][...]),
        x.alpha[...],
        (rows[0], rows[1]),
        (rows[2], rows[3]),
    )
    return chunk, flags[0], (flags[1] if len(flags) > 1 else None)


def _load(refs):
    return jax.tree.map(lambda ref: ref[...].astype(F32), refs)


def _store(refs, values):
    jax.tree.map(lambda ref, x: ref.__setitem__(..., x.astype(ref.dtype)), refs, values)


def _forward_kernel(x, before, empty, after, y, kept, *, options):
    @pl.when(pl.program_id(1) == 0)
    def _():
        _store(after, _load(before))

    memories = _load(after)
    if kept is not None:
        _store(kept, memories.start)
    chunk, complete, cleared = _read(x)
    memories, read = one_chunk.advance(
        chunk, memories, _load(empty), complete, cleared, options
    )
    _store(after, memories)
    _store(y, read)


def _backward_kernel(
    x, running, empty, kept, d_after, d_y, d_x, d_before, d_empty, *, options
):
    @pl.when(pl.program_id(1) == 0)
    def _():
        _store(d_before, _load(d_after))
        _store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    chunk, complete, cleared = _read(x)
    start = _load(kept)
    # After the first chunk the two memories are equal, where there are tokens.
    first = pl.program_id(1) == pl.num_programs(1) - 1
    begun = jax.tree.map(lambda r, s: jnp.where(first, r, s), _load(running), start)

    def advance(chunk, memories, empty) -> Any:
        return one_chunk.advance(chunk, memories, empty, complete, cleared, options)

    _, pull = jax.vjp(advance, chunk, Memories(start, begun), _load(empty))
    d_chunk, d_memories, d_fresh = pull((_load(d_before), d_y[...].astype(F32)))
    _store(d_before, d_memories)
    _store(d_empty, jax.tree.map(lambda a, b: a + b, _load(d_empty), d_fresh))
    _store(d_x.q, d_chunk.q)
    _store(d_x.inputs, d_chunk.inputs)
    _store(d_x.alpha, d_chunk.alpha)
    rows = (*d_chunk.gamma, *d_chunk.g)
    for i in range(d_x.gates.shape[1]):
        # Flags have no gradient.
        d_x.gates[:, i, :] = rows[i] if i < len(rows) else jnp.zeros_like(rows[0])


def _forward(static: Static, x: Inputs, memories: Memories, empty, *, keep: bool):
    like = functools.partial(varying.like, x.q)
    y = like(x.inputs[1].shape, x.inputs[1].dtype)
    at_start = lambda m: like((m.shape[0], x.q.shape[1], *m.shape[1:]), x.q.dtype)
    kept = jax.tree.map(at_start, memories.start) if keep else None
    after = jax.tree.map(lambda m: like(m.shape, F32), memories)
    specs = functools.partial(_specs, static.heads, lambda i: i)
    return _call(
        static,
        _forward_kernel,
        "trellis_forward",
        (x, memories, empty),
        (specs(x, 4), specs(memories, 3), specs(empty, 3)),
        (after, y, kept),
        (specs(after, 3), specs(y, 4), specs(kept, 4)),
    )


def _backward(static: Static, x: Inputs, running, empty, kept, d_after, d_y):
    n = x.q.shape[1]
    like = lambda tree: jax.tree.map(
        lambda a: varying.like(x.q, a.shape, a.dtype), tree
    )
    specs = functools.partial(_specs, static.heads, lambda i: n - 1 - i)
    before, fresh = like(Memories(running, running)), like(empty)
    return _call(
        static,
        _backward_kernel,
        "trellis_backward",
        (x, running, empty, kept, d_after, d_y),
        (
            specs(x, 4),
            specs(running, 3),
            specs(empty, 3),
            specs(kept, 4),
            specs(d_after, 3),
            specs(d_y, 4),
        ),
        (like(x), before, fresh),
        (specs(x, 4), specs(before, 3), specs(fresh, 3)),
    )


def _specs(heads, order, tree, axes):
    """Blocks of a program: [G, n, ., .] by chunk in `order`, [G, ., .] for them all."""

    def spec(x):
        if axes == 4:
            index = lambda g, i: (g, order(i), 0, 0)
            return pl.BlockSpec((heads, None, *x.shape[2:]), index)
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
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=static.interpret,
        name=name,
    )(*inputs)
