"""The two kernels of an op that brings the equations of a chunk and of its gradient.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all chunks of a head share: they hold the memory, or its cotangent, between chunks.
"""

import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import columns
from memjax_kernels._src.common.packs.blocks import (
    BLOCK_BYTES,
    divisor,
    group_size,
)
from memjax_kernels._src.common.packs.chunkwise import (
    Chunks,
    Layout,
    Op,
    Static,
    kernels_of,
)
from memjax_kernels._src.common.packs.staggered import staggered
from memjax_kernels._src.common.products import Multiply

F32 = jnp.float32
# At most: batch elements of a program, and tokens of all packs that go through phases
# in step. A short chunk alone waits for its products.
BATCH, TOKENS = 4, 256


class Chunk(NamedTuple):
    """Tokens of one chunk, and the gate in all lanes of its head."""

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    gate: Float[Array, "P C KK"]


class Cotangents(NamedTuple):
    """Of a chunk, with that of the gate before the sum over lanes, and the memory."""

    x: Chunk
    memory: PyTree


class Equations(NamedTuple):
    """The equations of an op; both functions yield between their phases.

    Attributes:
        advance: (chunk, memory) -> (memory, reads).
        vjp: (chunk, memory, cotangents of the memory after it and of the reads) ->
            `Cotangents`; the memory's are 0 where the chunk is not full.
        lags: phases by which a group of rows is behind the one before it, of both.
    """

    advance: Callable[..., Generator[None, None, tuple[PyTree, Array]]]
    vjp: Callable[..., Generator[None, None, Cotangents]]
    lags: tuple[int, int]


def op_of(
    name: str,
    equations: Callable[[Any, int, Multiply], Equations],
    form: Callable[..., tuple[PyTree, Array]],
    residuals: Callable[[Any], PyTree],
) -> Callable[..., Any]:
    """An op by its equations, of (options, heads of a pack, multiply); see `Op`.

    Returns:
        (chunks with q, k, v, a gate and the flag `full`, memory, empty, options,
        heads of a pack, bytes of VMEM that a head takes, interpret) -> (memory, y).
    """

    def of(kernel):
        def run(*refs, layout: Layout, options, multiply):
            brought = equations(options, layout.heads, multiply)
            kernel(*refs, layout=layout, equations=brought)

        return run

    kernels = kernels_of(
        Op(name, of(forward_kernel), of(backward_kernel), form, residuals)
    )

    def run(x: Chunks, memory, empty, options, heads, head_bytes, interpret):
        b, _, size, number = x.tokens[0].shape[:4]
        each = heads * head_bytes
        group = group_size(number // heads, each)
        # Batch elements of a program, each with its tokens in all packs.
        rows = divisor(b, min(BATCH, BLOCK_BYTES // (group * each)))
        phased = rows // divisor(rows, max(1, TOKENS // (group * size)))
        resets = x.reset is not None
        layout = Layout(rows, group, heads, size, (1,), True, resets, phased)
        return kernels(Static(options, layout, interpret), x, memory, empty)

    return run


def forward_kernel(
    x, before, empty, after, y, residuals, *, layout: Layout, equations: Equations
):
    """One chunk; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        jax.tree.map(lambda ref, given: ref.__setitem__(..., given[...]), after, before)

    chunk, full, reset = _read(x, layout)
    start = load(after)
    if reset is not None:
        start = choose(reset, load(empty), start)
    if residuals is not None:
        store(residuals, start)
    advance, lag = equations.advance, equations.lags[0]
    new, reads = staggered(advance, (chunk, start), layout.phased, lag)
    # A chunk that stays open leaves the memory at its start.
    store(after, choose(full, new, start))
    packs.store_rows(y, reads)


def backward_kernel(
    x,
    empty,
    residuals,
    d_after,
    d_y,
    d_tokens,
    d_gates,
    d_before,
    d_empty,
    *,
    layout: Layout,
    equations: Equations,
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        jax.tree.map(lambda ref, d: ref.__setitem__(..., d[...]), d_before, d_after)
        jax.tree.map(
            lambda ref: ref.__setitem__(..., jnp.zeros(ref.shape, F32)), d_empty
        )

    chunk, full, reset = _read(x, layout)
    d_whole = load(d_before)
    zeros = jax.tree.map(jnp.zeros_like, d_whole)
    d_new = choose(full, d_whole, zeros)
    given = chunk, load(residuals), d_new, packs.load_rows(d_y, layout.group)
    found = staggered(equations.vjp, given, layout.phased, equations.lags[1])
    d = jax.tree.map(
        lambda d, whole, new: d + (whole - new), found.memory, d_whole, d_new
    )
    if reset is not None:
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        emptied = choose(reset, d, zeros)
        store(d_empty, jax.tree.map(jnp.add, load(d_empty), emptied))
        d = choose(reset, zeros, d)
    store(d_before, d)
    for ref, value in zip(d_tokens, found.x[:3], strict=True):
        packs.store_rows(ref, value)
    d_gates[...] = columns.sum_lanes(
        found.x.gate, d_gates.shape, layout.group, layout.heads
    )


def _read(x, layout: Layout) -> tuple[Chunk, Array, Array | None]:
    """The chunk of P = rows * group packs, and its flags, float32 [P, 1, 1]."""
    gates = x.gates[...]
    q, k, v = (packs.load_rows(ref, layout.group) for ref in x.tokens)
    first = layout.gate_columns

    def flag(index):
        each = gates[:, :1, first + index : first + index + 1]
        return packs.each_pack(
            jnp.broadcast_to(each[:, None], (*each.shape[:1], layout.group, 1, 1))
        )

    reset = flag(1) if layout.resets else None
    gate = columns.spread(gates, q.shape[-1], layout.group, layout.heads)
    return Chunk(q, k, v, gate), flag(0), reset


def load(refs: PyTree) -> PyTree[Float[Array, "P M DD"]]:
    """Memories in float32."""
    return jax.tree.map(lambda ref: packs.each_pack(ref[...]).astype(F32), refs)


def store(refs: PyTree, values: PyTree) -> None:
    """Undoes `load`."""

    def write(ref, x):
        ref[...] = x.reshape(ref.shape).astype(ref.dtype)

    jax.tree.map(write, refs, values)


def choose(flag: Array | None, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the flag is 1, and where there is none."""
    if flag is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, flag > 0.5), new, old)
