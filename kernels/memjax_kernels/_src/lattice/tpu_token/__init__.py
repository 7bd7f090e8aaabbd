"""Lattice with C = 1 on a TPU for packed heads: tokens one after the other.

A block is 16 tokens of all packs of a program, which are computed in step on the vector
unit, in float32: as exact as `chunk.token`. Two tokens are scheduled together, so that
the read of one fills the time in which the next waits for its sums.

The forward kernel also saves the memory before every block where a gradient is taken.
The backward kernel goes through the blocks in reverse and computes each again.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels._src.common import gradients, varying
from memjax_kernels._src.common.packs.blocks import (
    BLOCK_BYTES,
    ROWS,
    Specs,
    divisor,
    flag_columns,
    gate_columns,
    gates_of_columns,
    join_chunks,
    pack_heads,
    packings,
    split_chunks,
    unpack_heads,
)
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.tpu_packed_kernels import Layout
from memjax_kernels._src.lattice.tpu_token.equations import Sums
from memjax_kernels._src.lattice.tpu_token.kernels import (
    Rows,
    backward_kernel,
    forward_kernel,
)
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32
# Packs of a program, up to which it takes further batch elements.
PACKS = 6


class Static(NamedTuple):
    """Static arguments of the kernels."""

    rule: Rule
    layout: Layout
    interpret: Any


class Blocks(NamedTuple):
    """A segment as the kernels take it.

    Attributes:
        tokens: q, k and v, each [B, m, 16, H D].
        gates: [B, m, groups, 16, R] float32: gamma, and reset if resets were given.
    """

    tokens: tuple[Any, Any, Any]
    gates: Any


def fits(tokens: Chunks) -> bool:
    """Whether chunks are tokens, packs of heads fill whole registers, and one VMEM."""
    return tokens.q.shape[2] == 1 and _heads(tokens) > 0


def _heads(tokens: Chunks) -> int:
    """Heads of a pack, as few as fill the lanes; 0 is none."""
    (*_, heads, slots), width = tokens.q.shape, tokens.v.shape[4]
    fitting = packings(heads, (slots, width), _block_bytes(slots, width))
    return min(fitting, default=0)


def _block_bytes(slots: int, width: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Three of a memory's size for each token, two buffers of five in and
    # out, and ten in between; tokens with their cotangents.
    return 4 * (slots * width * (3 * ROWS + 20) + ROWS * 12 * (slots + width))


def lattice_tokens(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation for tokens that `fits` takes; see `segment`."""
    heads = _heads(tokens)
    (b, _, _, number, slots), width = tokens.q.shape, tokens.v.shape[4]
    each = heads * _block_bytes(slots, width)
    group = divisor(number // heads, min(PACKS, BLOCK_BYTES // each))
    rows = min(PACKS // group, BLOCK_BYTES // (group * each))
    rows, resets = divisor(b, rows), tokens.reset is not None
    layout = Layout(rows, group, heads, resets, phased=1)
    reset = None if tokens.reset is None else tokens.reset.astype(F32)
    tokens = tokens._replace(gamma=tokens.gamma.astype(F32), reset=reset)
    # Every chunk is full, but those of padding, which write nothing.
    tokens = tokens._replace(full=None)
    static = Static(rule, layout, interpret)
    return _tokens(static, *varying.vary_alike((tokens, start, empty)))


def _in_blocks(static: Static, x: Chunks) -> Blocks:
    join = functools.partial(join_chunks, parts=ROWS)

    def flat(t):
        return join(t).reshape(t.shape[0], -1, ROWS, t.shape[3] * t.shape[4])

    gates = gate_columns(join(x.gamma), static.layout.group, static.layout.heads)
    if x.reset is not None:
        flags = flag_columns(join(x.reset[..., None]), gates)
        gates = jnp.concatenate([gates, flags], axis=-1)
    return Blocks((flat(x.q), flat(x.k), flat(x.v)), gates)


def _of_blocks(x: Array, like: Array) -> Array:
    """[B, m, 16, H D] as `like`, [B, n, 1, H, D]."""
    x = x.reshape(*x.shape[:3], *like.shape[3:])
    return split_chunks(x, ROWS, like.shape[1])


def _forward(static: Static, x: Chunks, start, empty, *, with_residuals: bool):
    blocks, layout = _in_blocks(static, x), static.layout
    join = functools.partial(pack_heads, heads=layout.heads)
    start, empty = join(start), join(empty)
    like = functools.partial(varying.like, x.q)
    y, after = like(blocks.tokens[2].shape, x.v.dtype), like(start.shape, F32)
    number = blocks.gates.shape[1]
    residuals = (
        like((start.shape[0], number, *start.shape[1:]), F32)
        if with_residuals
        else None
    )
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: i)
    rows = _rows(static, blocks)
    after, y, residuals = _call(
        of,
        static,
        forward_kernel,
        "lattice_token_forward",
        blocks,
        inputs=(start, empty),
        outputs=(after, y, residuals),
        specs=(_specs(of, blocks), of.memories(start), of.memories(empty)),
        out_specs=(of.memories(after), of.tokens(y), of.residuals(residuals)),
        scratch=[rows, rows.v],
    )
    return (unpack_heads(after, layout.heads), _of_blocks(y, x.v)), residuals


def _backward(static: Static, primals, residuals, cotangents):
    x, _, empty = primals
    d_after, d_y = cotangents
    blocks, layout = _in_blocks(static, x), static.layout
    join = functools.partial(pack_heads, heads=layout.heads)
    empty, d_after = join(empty), join(d_after)
    d_y = join_chunks(d_y, ROWS).reshape(blocks.tokens[2].shape)
    like = functools.partial(varying.like, x.q)
    shaped = functools.partial(varying.like_tree, x.q)
    n, memory = blocks.gates.shape[1], shaped(empty)
    d_gates = like((*blocks.gates.shape[:4], layout.heads * layout.group), F32)
    # The backward pass goes through the blocks in reverse.
    groups = blocks.gates.shape[2]
    of = Specs(layout.rows, layout.group, groups, lambda i: n - 1 - i)
    rows = _rows(static, blocks)
    shape = (ROWS + 1, layout.rows * layout.group, *empty.shape[2:])
    memories: Any = pltpu.VMEM(shape, F32)
    (d_q, d_k, d_v), d_gates, d_start, d_empty = _call(
        of,
        static,
        backward_kernel,
        "lattice_token_backward",
        blocks,
        inputs=(empty, residuals, d_after, d_y),
        outputs=(shaped(blocks.tokens), d_gates, memory, memory),
        specs=(
            _specs(of, blocks),
            of.memories(empty),
            of.residuals(residuals),
            of.memories(d_after),
            of.tokens(d_y),
        ),
        out_specs=(
            of.tokens(blocks.tokens),
            of.gates(d_gates),
            *of.memories((memory, memory)),
        ),
        scratch=[rows, rows.v, rows, memories, Sums(memories, memories)],
    )
    gamma = gates_of_columns(d_gates, layout.group, layout.heads)
    d_x = x._replace(
        q=_of_blocks(d_q, x.q),
        k=_of_blocks(d_k, x.k),
        v=_of_blocks(d_v, x.v),
        gamma=split_chunks(gamma, ROWS, x.q.shape[1]),
        # A flag has no gradient.
        reset=None if x.reset is None else jnp.zeros_like(x.reset),
    )
    return d_x, unpack_heads(d_start, layout.heads), unpack_heads(d_empty, layout.heads)


def _scratch(static: Static, width: int):
    return pltpu.VMEM((static.layout.rows * static.layout.group, ROWS, width), F32)


def _rows(static: Static, x: Blocks) -> Rows:
    """Room for a block's tokens and rates."""
    number = static.layout.group * x.gates.shape[2]
    q, k, v = (_scratch(static, y.shape[3] // number) for y in x.tokens)
    return Rows(q, k, v, v)


def _in_xla(static: Static, x: Chunks, start, empty):
    """The function of the forward kernel."""
    reset = None if x.reset is None else x.reset > 0.5
    full = jnp.ones(x.q.shape[:2], bool)
    x = x._replace(full=full, reset=reset)
    return lattice_xla(x, start, empty, static.rule)


_tokens = gradients.of_kernels("lattice", _forward, _backward, _in_xla)


def _specs(of: Specs, x: Blocks) -> Blocks:
    return Blocks(of.tokens(x.tokens), of.gates(x.gates))


def _call(of: Specs, static: Static, kernel, name, x: Blocks, **blocks):
    variant = static.rule.variant
    kernel = functools.partial(kernel, layout=static.layout, variant=variant)
    return of.call(kernel, name, x, **blocks, interpret=static.interpret)
