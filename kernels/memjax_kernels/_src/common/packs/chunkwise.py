"""Ops of chunks on a TPU for packed heads: without a copy of the tokens.

The grid is (batch elements, groups of packs, blocks), the last in order. All packs of a
group, and of a few batch elements where these are small, are computed in one program,
so that one hides the latency of another. A block is a chunk, or a few. The memory is an
output block that all blocks of a head share: it stays in VMEM from the first to the
last. An op brings the two kernels; `chunk_kernels` makes them of the equations of a
chunk and of its gradient.

Where a gradient is taken the forward kernel also saves the memory before every chunk,
or before some. The backward kernel goes through the chunks in reverse and computes each
again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common import chunks, gradients, products, varying
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.packs import pack_products
from memjax_kernels._src.common.packs.blocks import (
    PARAMS,
    Specs,
    flag_columns,
    gate_columns,
    gates_of_columns,
    join_chunks,
    pack_heads,
    repeat_heads,
    split_chunks,
    unpack_heads,
)
from memjax_kernels._src.common.packs.layout import Layout

F32 = jnp.float32


# Any: jax also builds this class around shapes, blocks and references.
class Blocks(NamedTuple):
    """A segment as the kernels take it.

    Attributes:
        tokens: [B, n, C, H D].
        gates: float32 [B, n, groups, C, R]: columns of gates, full, and reset; None
            for an op without.
    """

    tokens: Any
    gates: Any


def _of_gates(d: Any, x: Chunks) -> tuple[Any, ...]:
    return jax.tree.map(lambda gate: d.reshape(gate.shape), x.gates)


class Op(NamedTuple):
    """The parts of an op.

    Attributes:
        name: of the op.
        layout: chunks -> that of their programs; None where heads fill no registers.
        forward: (x, before, empty, after, y, residuals), all of references.
        backward: (x, empty, residuals, d_after, d_y, d_tokens, d_gates, d_before,
            d_empty). Both with keywords `layout`, `options` and `multiply`.
        form: the same in XLA, (chunks, memory, empty, options) -> (memory, y).
        residuals: the dtype of the tokens -> those of the memory before chunks.
        gate_rows: whether a chunk's cotangents of a pack's gates are rows with tokens
            along the lanes, one a pass of each gate; else columns, as the gates.
        of_gates: (those cotangents, [B, n, C, H, .], chunks in blocks) -> those of the
            gates; without it there is one gate at most.
    """

    name: str
    layout: Callable[[Chunks], Layout | None]
    forward: Callable[..., None]
    backward: Callable[..., None]
    form: Callable[..., tuple[PyTree, Array]]
    residuals: Callable[[Any], PyTree]
    gate_rows: bool = False
    of_gates: Callable[..., tuple[Any, ...]] = _of_gates


class Static(NamedTuple):
    """Static arguments of the kernels; `options` are the op's own."""

    options: Any
    layout: Layout
    interpret: Any


def kernels_of(op: Op) -> Callable[..., Any]:
    """An op's chunk implementation, (chunks, memory, empty, rule) -> (memory, y).

    See `steps.segment`. `rule` has the op's own options; `interpret` is that of
    `pallas_call`: False, or `pltpu.InterpretParams`.
    """

    def form(static, x, memory, empty):
        memory, y = op.form(chunks.bool_flags(x), memory, empty, static.options)
        return memory, y.reshape(*y.shape[:3], -1)

    forward, backward = (functools.partial(f, op) for f in (_forward, _backward))
    # Names of what is saved differ from those of kernels for GPUs, which save more.
    on_chunks = gradients.of_kernels(f"{op.name}_tpu", forward, backward, form)

    def run(x: Chunks, memory, empty, rule=None, *, interpret: Any = False):
        layout = op.layout(x)
        if layout is None:
            # A device's share of the heads may fill no register.
            return op.form(x, memory, empty, rule)
        q, k, v, *others = x.tokens
        copies = v.shape[3] // q.shape[3] // layout.ways
        tokens = repeat_heads(q, copies), repeat_heads(k, copies), v, *others
        gates = jax.tree.map(lambda gate: gate.astype(F32), x.gates)
        x = chunks.float_flags(x._replace(tokens=tokens, gates=gates))
        given = varying.vary_alike((x, memory, empty))
        memory, y = on_chunks(Static(rule, layout, interpret), *given)
        # A rematerialisation that saves reads has them as [B, n, C, H D]: rows of a
        # head would be padded to 128 lanes.
        return memory, y.reshape(v.shape)

    return run


def _in_blocks(layout: Layout, x: Chunks) -> Chunks:
    """Several chunks in one, and flags of every token."""
    join = functools.partial(join_chunks, number=layout.chunks)

    def of_tokens(f):
        return jnp.broadcast_to(f[..., None], x.tokens[0].shape[:3])

    full, reset = jax.tree.map(of_tokens, (x.full, x.reset))
    return jax.tree.map(join, x._replace(full=full, reset=reset))


def _arrange(layout: Layout, x: Chunks) -> Blocks:
    # Passes of one gate, then those of the next.
    gates = [gate.reshape(*gate.shape[:4], -1) for gate in jax.tree.leaves(x.gates)]
    if gates:
        joined = jnp.concatenate(gates, axis=-1)
        gates = [gate_columns(joined, layout.group, layout.heads)]
    flags = [flag for flag in (x.full, x.reset) if flag is not None]
    gates += [flag_columns(flag, gates[0]) for flag in flags]
    tokens = jax.tree.map(lambda t: t.reshape(*t.shape[:3], -1), x.tokens)
    return Blocks(tokens, jnp.concatenate(gates, axis=-1) if gates else None)


def _specs_for(layout: Layout, x: Chunks, order: Callable[[Any], Any]) -> Specs:
    groups = x.tokens[2].shape[3] // (layout.group * layout.heads)
    return Specs(layout.rows, layout.group, groups, order)


def _shares(layout: Layout, tokens: Any) -> Any:
    """Programs that have the same block of q, k, and the others."""
    leaves, tree = jax.tree.flatten(tokens)
    return tree.unflatten([layout.share] * 2 + [1] * (len(leaves) - 2))


def _forward(op: Op, static: Static, x: Chunks, memory, empty, *, with_residuals: bool):
    layout, values = static.layout, x.tokens[2]
    x = _in_blocks(layout, x)
    blocks = _arrange(layout, x)
    join = functools.partial(pack_heads, heads=layout.heads)
    memory, empty = jax.tree.map(join, (memory, empty))
    like = functools.partial(varying.like, values)
    y = like(blocks.tokens[2].shape, values.dtype)
    after = jax.tree.map(lambda m: like(m.shape, F32), memory)
    residuals = None
    if with_residuals:
        number = x.tokens[0].shape[1]

        def saved(m, dtype):
            b, of_all, slots, width = m.shape
            return like((b, number, of_all, layout.saved * slots, width), dtype)

        residuals = jax.tree.map(saved, memory, op.residuals(values.dtype))
    of = _specs_for(layout, x, lambda i: i)
    after, y, residuals = pl.pallas_call(
        _with_static(op.forward, static, blocks),
        grid=of.grid(y),
        in_specs=(_specs(of, layout, blocks), of.memories(memory), of.memories(empty)),
        out_specs=(of.memories(after), of.tokens(y), of.residuals(residuals)),
        out_shape=(after, y, residuals),
        compiler_params=PARAMS,
        interpret=static.interpret,
        name=f"{op.name}_forward",
    )(blocks, memory, empty)
    part = functools.partial(unpack_heads, heads=layout.heads)
    return (jax.tree.map(part, after), split_chunks(y, layout.chunks)), residuals


def _backward(op: Op, static: Static, primals, residuals, cotangents):
    given, _, empty = primals
    d_after, d_y = cotangents
    layout, heads = static.layout, static.layout.heads
    x = _in_blocks(layout, given)
    blocks = _arrange(layout, x)
    join = functools.partial(pack_heads, heads=heads)
    empty, d_after = jax.tree.map(join, (empty, d_after))
    d_y = join_chunks(d_y, layout.chunks).reshape(blocks.tokens[2].shape)
    shaped = functools.partial(varying.like_tree, d_y)
    n = x.tokens[0].shape[1]
    before, emptied = shaped(d_after), shaped(empty)
    # The backward pass goes through the blocks in reverse.
    of = _specs_for(layout, x, lambda i: n - 1 - i)
    d_tokens = _tokens_like(layout, blocks)
    d_gates, gate_spec = _gates_like(op, layout, of, blocks)
    d_tokens, d_gates, d_memory, d_empty = pl.pallas_call(
        _with_static(op.backward, static, blocks),
        grid=of.grid(d_y),
        in_specs=(
            _specs(of, layout, blocks),
            of.memories(empty),
            of.residuals(residuals),
            of.memories(d_after),
            of.tokens(d_y),
        ),
        out_specs=(
            of.tokens(d_tokens),
            gate_spec,
            of.memories(before),
            of.memories(emptied),
        ),
        out_shape=(d_tokens, d_gates, before, emptied),
        compiler_params=PARAMS,
        interpret=static.interpret,
        name=f"{op.name}_backward",
    )(blocks, empty, residuals, d_after, d_y)
    d_gates = op.of_gates(_by_head(op, layout, d_gates), x)
    of_tokens = functools.partial(_of_blocks, layout)
    # Flags have no gradient.
    no_flags = jax.tree.map(jnp.zeros_like, given[2:])
    d_x = Chunks(
        jax.tree.map(of_tokens, d_tokens, given.tokens),
        jax.tree.map(lambda d: split_chunks(d, layout.chunks), d_gates),
        *no_flags,
    )
    part = functools.partial(unpack_heads, heads=heads)
    return d_x, *jax.tree.map(part, (d_memory, d_empty))


def _of_blocks(layout: Layout, x: Array, like: Array) -> Array:
    """[B, m, parts C, H D] as `like`, [B, n, C, H, D]; the sum of programs' parts."""
    heads, width = like.shape[3:]
    parts = x.reshape(*x.shape[:3], heads, -1, width)
    if parts.shape[4] > 1:
        parts = parts.sum(4).astype(like.dtype)
    x = parts.reshape(*x.shape[:3], heads, width)
    return split_chunks(x, layout.chunks)


def _tokens_like(layout: Layout, x: Blocks) -> Any:
    """The cotangents of tokens: of a shared key head, each program's part."""

    def part(y, share):
        shape = (*y.shape[:3], share * y.shape[3])
        return varying.like(y, shape, y.dtype if share == 1 else F32)

    return jax.tree.map(part, x.tokens, _shares(layout, x.tokens))


def _gates_like(op: Op, layout: Layout, of: Specs, x: Blocks):
    """The cotangents of gates, and their blocks."""
    if x.gates is None:
        return None, None
    like = functools.partial(varying.like, x.gates)
    batch, n, groups, size, _ = x.gates.shape
    if not op.gate_rows:
        columns = like((batch, n, groups, size, layout.gate_columns), F32)
        return columns, of.gates(columns)
    packs = groups * layout.group
    rows = sum(layout.passes) * layout.chunks, layout.heads * size // layout.chunks
    rows = like((batch, n, packs, *rows), F32)
    return rows, of.residuals(rows)


def _by_head(
    op: Op, layout: Layout, d: Float[Array, "B n _ _ _"] | None
) -> Float[Array, "B n C H _"] | None:
    if d is None or not op.gate_rows:
        return d if d is None else gates_of_columns(d, layout.group, layout.heads)
    (b, n, packs), rows = d.shape[:3], sum(layout.passes)
    split = d.reshape(b, n, packs, layout.chunks, rows, layout.heads, -1)
    by_token = split.transpose(0, 1, 3, 6, 2, 5, 4)
    heads = packs * layout.heads
    return by_token.reshape(b, n, -1, heads, rows)


def _specs(of: Specs, layout: Layout, x: Blocks) -> Blocks:
    tokens = jax.tree.map(of.tokens, x.tokens, _shares(layout, x.tokens))
    return Blocks(tokens, of.gates(x.gates))


def _with_static(kernel: Callable[..., None], static: Static, blocks: Blocks):
    dtype = products.operand_dtype(blocks.tokens[0])
    multiply = functools.partial(pack_products.multiply, dtype=dtype)
    options, layout, _ = static
    return functools.partial(kernel, layout=layout, options=options, multiply=multiply)
