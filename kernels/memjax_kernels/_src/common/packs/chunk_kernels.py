"""The two kernels of an op that brings the equations of a chunk and of its gradient.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all chunks of a head share: they hold the memory, or its cotangent, between chunks.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import columns, tuned
from memjax_kernels._src.common.packs.blocks import LANES, misfit
from memjax_kernels._src.common.packs.chunkwise import Chunks, Op, kernels_of
from memjax_kernels._src.common.packs.layout import Layout, packings, plan
from memjax_kernels._src.common.packs.staggered import staggered
from memjax_kernels._src.common.products import Multiply

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk, and the gate in all lanes of its head."""

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    gate: Float[Array, "P C KK"]


class Cotangents(NamedTuple):
    """Of a chunk.

    Attributes:
        tokens: in their order.
        gates: before the sum over lanes.
        memory: before the chunk.
    """

    tokens: Sequence[Float[Array, "P C DD"]]
    gates: Any
    memory: PyTree


def _read(x, layout: Layout) -> Chunk:
    """The chunk of P = rows * group packs."""
    q, k, v = (packs.load_rows(ref, layout.group) for ref in x.tokens)
    return Chunk(q, k, v, columns.spread(x.gates[...], q.shape[-1], *layout.of_row))


def _gates(d: Float[Array, "P C KK"], x, layout: Layout) -> Float[Array, "rows C R"]:
    shape = (*x.gates.shape[:2], layout.gate_columns)
    return columns.sum_lanes(d, shape, *layout.of_row)


def _as_given(x, memory, layout: Layout) -> Any:
    return x


class Equations(NamedTuple):
    """The equations of an op; both functions yield between their phases.

    Attributes:
        advance: (chunk, memory) -> (memory, reads).
        vjp: (chunk, memory, cotangents of the memory after it and of the reads) ->
            `Cotangents`; the memory's are 0 where the chunk is not full.
        prepare: (references to tokens and gates, and to the memory, layout) -> what the
            other functions take as the former.
        read: (references to tokens and gates, layout) -> chunk.
        gates: (cotangents of gates, these references, layout) -> their columns.
        mild: (references to tokens and gates) -> whether a chunk forgets little, None
            for dtypes that have one code; and the equations of such chunks.
    """

    advance: Callable[..., Generator[None, None, tuple[PyTree, Array]]]
    vjp: Callable[..., Generator[None, None, Cotangents]]
    prepare: Callable[..., Any] = _as_given
    read: Callable[..., Any] = _read
    gates: Callable[..., Float[Array, "rows C R"]] = _gates
    mild: tuple[Callable[..., Any], "Equations"] | None = None

    def choose(self, x: Any, compute: Callable[["Equations"], None]) -> None:
        """Computes a chunk by the equations that its gates allow."""
        forgets_little, mild = self.mild or (lambda _: None, self)
        little = forgets_little(x)
        if little is None:
            compute(self)
            return
        pl.when(little)(lambda: compute(mild))
        pl.when(jnp.logical_not(little))(lambda: compute(self))


def kernels_by(
    name: str,
    layout: Callable[[Chunks], Layout | None],
    equations: Callable[[Any, int, Multiply], Equations],
    form: Callable[..., tuple[PyTree, Array]],
    residuals: Callable[[Any], PyTree],
) -> Callable[..., Any]:
    """The kernels of an op by its equations, of (options, heads of a pack, multiply).

    See `chunkwise.Op` for the other arguments, `chunkwise.kernels_of` for the result.
    """

    def of(kernel):
        def run(*refs, layout: Layout, options, multiply):
            brought = equations(options, layout.heads, multiply)
            kernel(*refs, layout=layout, equations=brought)

        return run

    kernels = of(forward_kernel), of(backward_kernel)
    return kernels_of(Op(name, layout, *kernels, form, residuals))


class PackedOp:
    """An op of q, k, v and one gate by its equations; arguments as of `kernels_by`.

    The table of `tuned` has its name.
    """

    def __init__(self, name: str, *brought: Any):
        self.name, self.kernels = name, kernels_by(name, self.layout, *brought)

    @property
    def sizes(self) -> tuned.Packed:
        """Sizes of the op's programs, from the table."""
        return getattr(tuned.SIZES, self.name)

    def heads(self, number: int, size: int, *widths: int) -> int:
        """Heads of a pack, as few as fill the lanes; 0 is none."""
        return min(packings(self.sizes, number, size, widths), default=0)

    def unsupported(self, q: Array, k: Array, v: Array, chunk_size: int) -> str:
        """Why the kernels cannot take these arguments on any TPU; "" if they can."""
        if reason := misfit(q, k, v, chunk_size):
            return reason
        (number, key_dim), value_dim = q.shape[2:], v.shape[-1]
        if not self.heads(number, chunk_size, key_dim, value_dim):
            return (
                f"no number of {number} heads, {key_dim} wide in q and k and "
                f"{value_dim} in v, fills rows of {LANES} each and fits in VMEM"
            )
        return ""

    def layout(self, x: Chunks) -> Layout | None:
        """That of the programs for these chunks, if heads fill the lanes."""
        _, _, size, number, key_dim = x.tokens[0].shape
        heads = self.heads(number, size, key_dim, x.tokens[2].shape[-1])
        return plan(self.sizes, x, heads) if heads else None


def forward_kernel(
    x, before, empty, after, y, residuals, *, layout: Layout, equations: Equations
):
    """One chunk; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        jax.tree.map(lambda ref, given: ref.__setitem__(..., given[...]), after, before)

    x = equations.prepare(x, after, layout)

    def compute(equations: Equations):
        (full, reset), chunk = _flags(x, layout), equations.read(x, layout)
        start = load(after)
        if reset is not None:
            start = choose(reset, load(empty), start)
        if residuals is not None:
            store(residuals, start)
        given = chunk, start
        new, reads = staggered(equations.advance, given, layout.phased, layout.lags[0])
        # A chunk that stays open leaves the memory at its start.
        store(after, choose(full, new, start))
        packs.store_rows(y, reads)

    equations.choose(x, compute)


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

    x = equations.prepare(x, residuals, layout)

    def compute(equations: Equations):
        (full, reset), chunk = _flags(x, layout), equations.read(x, layout)
        d_whole = load(d_before)
        zeros = jax.tree.map(jnp.zeros_like, d_whole)
        d_new = choose(full, d_whole, zeros)
        given = chunk, load(residuals), d_new, packs.load_rows(d_y, layout.group)
        found = staggered(equations.vjp, given, layout.phased, layout.lags[1])
        d = found.memory
        if full is not None:
            d = jax.tree.map(lambda d, whole, new: d + (whole - new), d, d_whole, d_new)
        if reset is not None:
            # Every reset reads `empty`, so that its gradient is a sum over chunks.
            emptied = choose(reset, d, zeros)
            store(d_empty, jax.tree.map(jnp.add, load(d_empty), emptied))
            d = choose(reset, zeros, d)
        store(d_before, d)
        ways = [layout.ways] * 2 + [1] * (len(d_tokens) - 2)
        for ref, value, shared in zip(d_tokens, found.tokens, ways, strict=True):
            packs.store_rows(ref, value, layout.heads, shared)
        if d_gates is not None:
            d_gates[...] = equations.gates(found.gates, x, layout)

    equations.choose(x, compute)


def _flags(x, layout: Layout) -> tuple[Array | None, Array | None]:
    """The flags `full` and `reset` of each pack, float32 [P, 1, 1]."""

    def flag(is_there, index):
        if not is_there:
            return None
        at = layout.gate_columns + index
        each = x.gates[:, :1, at : at + 1]
        return packs.each_pack(
            jnp.broadcast_to(each[:, None], (*each.shape[:1], layout.group, 1, 1))
        )

    return flag(layout.opens, 0), flag(layout.resets, int(layout.opens))


def load(refs: PyTree) -> PyTree[Float[Array, "P _ _"]]:
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
