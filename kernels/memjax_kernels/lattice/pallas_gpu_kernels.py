"""The kernels of Lattice on a GPU; `pallas_gpu` prepares what they take.

All chunks of one row and head are one program. Its memory stays in shared memory in
float32; products read operands in the dtype of the tokens. `chunk` has the equations.
In the backward kernel a bar denotes a cotangent, L sums over the tokens up to each, and
R is the memory before the division by its norms:

    A- = M <R-, M> - R-      (q rho)- = y- M^T (1 + cwp) + S- W    S- = -tril(y- H^T)
    n2- = -rho^3 rho- / 2    cwp- = y- M^T q rho - 2 cwp n2-
    W- = H A-^T + S-^T q rho + P L^T cwp- + 2 (before + W |h|^2) L^T n2- + T^T before-
    H- = W A- - S^T y- + (T- + T-^T) H + 2 |h|^2- H + P- M
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels import mosaic
from memjax_kernels.lattice.pallas_gpu import Inputs, Static
from memjax_kernels.mosaic import F32, ROWS, Machine


def forward(static: Static, x: Inputs, *, keep: bool):
    """Runs the forward kernel.

    Returns:
        y; the memory after the last whole chunk; what the one after it writes; and if
        `keep` the memory at every chunk's start, in the dtype of q, else None.
    """
    b, n, _, h, m = x.q.shape
    width = x.v.shape[-1]
    memory = jax.ShapeDtypeStruct((b, h, m, width), F32)
    kept = jax.ShapeDtypeStruct((b, n, h, m, width), x.q.dtype)
    outputs = (
        jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
        memory,
        memory,
        kept if keep else None,
    )
    scratch = _shared(x) | {
        "memory": mosaic.tile(m, width, dtype=F32),
        "memory_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=4),
        "reads": mosaic.tile(ROWS, width, dtype=x.q.dtype),
    }
    return _call(_Forward, static, x, (), outputs, scratch, "forward")


class Gradients(NamedTuple):
    """What the backward kernel gives: like the inputs, gamma [B, n, H, 64]."""

    q: Any
    k: Any
    v: Any
    gamma: Any
    start: Any
    empty: Any


def backward(static: Static, x: Inputs, kept, d_y, d_after, d_pending) -> Gradients:
    """Runs the backward kernel on what `forward` kept, and cotangents."""
    m, width = x.start.shape[2:]
    like = lambda a: None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype)
    outputs = Gradients(*map(like, (x.q, x.k, x.v, x.gamma, x.start, x.empty)))
    work = lambda *shape, dtype=x.q.dtype: mosaic.tile(*shape, dtype=dtype)
    scratch = _shared(x) | {
        "d_y": work(ROWS, width),
        "d_memory": work(m, width, dtype=F32),
        "d_memory_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=6),
        "d_written": work(m, width),
        "scores": work(ROWS, ROWS),
        "d_scores": work(ROWS, ROWS),
        "d_gamma": mosaic.vectors(ROWS),
    }
    for name in ("along", "before", "taken", "size"):
        scratch[name] = work(ROWS, m, dtype=F32)
    given = (kept, d_y, d_after, d_pending)
    x = x._replace(start=None, empty=None)
    return _call(_Backward, static, x, given, outputs, scratch, "backward")


def _shared(x: Inputs):
    """Scratch of both kernels."""
    m, width, dtype = x.q.shape[-1], x.v.shape[-1], x.q.dtype
    work = lambda width: mosaic.tile(ROWS, width, dtype=dtype)
    return {
        "q": work(m),
        "k": work(m),
        "v": work(width),
        "gamma": mosaic.vectors(ROWS),
        "operand": mosaic.tile(m, width, dtype=dtype),
        "h": work(width),
        "write": work(m),
        "gram": work(ROWS),
        "ones": work(ROWS),
        "high": work(m),
        "low": work(m),
        "query": work(m),
    }


def _call(program, static, x, more, outputs, scratch, name):
    given, tree = jax.tree.flatten((x, *more))
    out_types, out_tree = jax.tree.flatten(outputs)

    def body(*refs, **scratch):
        given_refs: Any = jax.tree.unflatten(tree, refs[: len(given)])
        out_refs = jax.tree.unflatten(out_tree, refs[len(given) :])
        program(static, *given_refs, out_refs, scratch).run()

    grid = x.q.shape[0], x.q.shape[3]
    name = f"memjax_lattice_{name}"
    run = mosaic.call(body, grid, out_types, scratch, name, static.interpret)
    return jax.tree.unflatten(out_tree, run(*given))


class _Program:
    """What both kernels do with a chunk."""

    def __init__(self, static: Static, x: Inputs, scratch):
        self.variant, self.x, self.scratch = static.variant, x, scratch
        self.machine = Machine(static.interpret)
        self.at = lax.axis_index("rows"), lax.axis_index("heads")
        self.chunks, self.size = x.q.shape[1:3]

    def prepare(self):
        """Rows that no token fills, and the matrix that sums over tokens."""
        machine, scratch = self.machine, self.scratch
        if self.size < ROWS:
            for name in self.tokens():
                ref = scratch[name]
                ref[...] = machine.zeros(ref.shape, ref.dtype)
        self.put("ones", self.ordered(strictly=False).astype(F32))
        plgpu.commit_smem()

    def tokens(self):
        return {"q": self.x.q, "k": self.x.k, "v": self.x.v}

    def fetch(self, i):
        row, head = self.at
        arrived = self.scratch["arrived"]
        for name, source in self.tokens().items():
            target = self.scratch[name].at[pl.ds(0, self.size)]
            plgpu.copy_gmem_to_smem(source.at[row, i, :, head, :], target, arrived)
        gamma = self.x.gamma.at[row, i, head]
        plgpu.copy_gmem_to_smem(gamma, self.scratch["gamma"], arrived)

    def ordered(self, *, strictly: bool):
        """Bool[64, 64]: whether j comes before i, or is i."""
        i, j = (self.machine.iota((ROWS, ROWS), axis) for axis in (0, 1))
        return i > j if strictly else i >= j

    def masked(self, square, *, strictly=False):
        return jnp.where(self.ordered(strictly=strictly), square, 0.0)

    def put(self, name, value):
        self.scratch[name][...] = value.astype(self.scratch[name].dtype)

    def matrix(self, name):
        return self.machine.matrix(self.scratch[name])

    def slots(self, vector):
        return mosaic.along_rows(vector, self.scratch["q"].shape[-1])

    def summed(self, x, form):
        """Sums over tokens up to each ("nn"), or from each on ("tn").

        They are terms of a difference: x is two operands, not one.
        """
        self.put("high", x)
        self.put("low", x - self.matrix("high"))
        plgpu.commit_smem()
        ones, high, low = (self.scratch[name] for name in ("ones", "high", "low"))
        return self.machine.total((ones, high, form), (ones, low, form))

    def residuals(self):
        """Puts h, write, gram in place; returns W, P, before and |h|^2."""
        machine, scratch = self.machine, self.scratch
        operand, h = scratch["operand"], scratch["h"]
        match self.variant:
            case "dec":
                rows = machine.product(scratch["k"], operand, "nn") - self.matrix("v")
            case "enc":
                rows = self.matrix("v")
            case _:
                rows = -self.matrix("v")
        squares = jnp.sum(rows * rows, axis=1)
        self.put("h", rows)
        plgpu.commit_smem()
        along, gram = machine.products((h, operand, "nt"), (h, h, "nt"))
        self.put("gram", self.masked(gram, strictly=True))
        write = self.slots(self.gamma()) * self.target(along)
        self.put("write", write)
        plgpu.commit_smem()
        before = machine.product(scratch["gram"], scratch["write"], "nn")
        return write, along, before, squares

    def gamma(self):
        return self.machine.row_vector(self.scratch["gamma"])

    def target(self, along):
        """c: what a slot is written with."""
        k = self.matrix("k")
        return along - k if self.variant == "enc" else k

    def sums(self, write, along, before, squares):
        """cwp and n2 of every token and slot."""
        taken = self.summed(write * along, "nn")
        added = 2.0 * write * before + write * write * self.slots(squares)
        return taken, self.summed(added, "nn") - taken * taken


def inverse_norm(size):
    """rho of n2, a difference that may round below 0."""
    return lax.rsqrt(1.0 + jnp.maximum(size, 0.0))


def unit(rows):
    """Rows divided by their norms, and one over those; a row of zeros stays."""
    squares = jnp.sum(rows * rows, axis=1)
    scale = jnp.where(squares > 0.0, lax.rsqrt(jnp.maximum(squares, 1e-37)), 0.0)
    scale = mosaic.along_rows(scale, rows.shape[1])
    return rows * scale, scale


def across_width(x):
    """Sums over the width, spread over it."""
    return mosaic.along_rows(jnp.sum(x, axis=1), x.shape[1])


class _Forward(_Program):
    """The forward kernel of one row and head."""

    def __init__(self, static, x, outputs, scratch):
        super().__init__(static, x, scratch)
        self.y, self.after, self.pending, self.kept = outputs

    def run(self):
        self.prepare()
        self.fetch_memory(self.x.start)
        shape = self.scratch["memory"].shape
        self.pending[*self.at] = self.machine.zeros(shape)
        whole = self.x.whole[self.at[0]]
        self.fetch(jnp.int32(0))
        lax.fori_loop(0, self.chunks, lambda i, _: self.chunk(i, whole), None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.scratch["memory"], self.after.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def fetch_memory(self, source):
        arrived = self.scratch["memory_arrived"]
        plgpu.copy_gmem_to_smem(source.at[*self.at], self.scratch["memory"], arrived)
        plgpu.barrier_wait(arrived)

    def chunk(self, i, whole):
        scratch, machine = self.scratch, self.machine
        row, head = self.at
        if self.x.cleared is not None:
            again = (i > 0) & (self.x.cleared[row, i] != 0)
            pl.when(again)(lambda: self.fetch_memory(self.x.empty))
        plgpu.wait_smem_to_gmem(0)
        self.put("operand", self.matrix("memory"))
        plgpu.commit_smem()
        if self.kept is not None:
            plgpu.copy_smem_to_gmem(scratch["operand"], self.kept.at[row, i, head])
        plgpu.barrier_wait(scratch["arrived"])
        write, along, before, squares = self.residuals()
        taken, size = self.sums(write, along, before, squares)
        query = self.matrix("q") * inverse_norm(size)
        self.put("query", query)
        self.put("high", query * (1.0 + taken))
        plgpu.commit_smem()
        # The tokens are in registers and in operands: the next may come.
        pl.when(i + 1 < self.chunks)(lambda: self.fetch(i + 1))
        scores = machine.product(scratch["query"], scratch["write"], "nt")
        self.put("gram", -self.masked(scores))
        plgpu.commit_smem()
        reads = machine.total(
            (scratch["high"], scratch["operand"], "nn"),
            (scratch["gram"], scratch["h"], "nn"),
        )
        self.put("reads", reads)
        plgpu.commit_smem()
        source = scratch["reads"].at[pl.ds(0, self.size)]
        plgpu.copy_smem_to_gmem(source, self.y.at[row, i, :, head, :])
        pl.when(i < whole)(self.write_memory)

        @pl.when(i == whole)
        def _():
            self.pending[*self.at] = self.written()

    def written(self):
        return self.machine.product(self.scratch["write"], self.scratch["h"], "tn")

    def write_memory(self):
        memory, written = self.matrix("memory"), self.written()
        after = memory + across_width(memory * written) * memory - written
        self.scratch["memory"][...] = unit(after)[0]


class _Backward(_Program):
    """The backward kernel of one row and head; gradients take the tokens' place."""

    def __init__(self, static, x, kept, d_y, d_after, d_pending, outputs, scratch):
        super().__init__(static, x, scratch)
        self.kept, self.d_y, self.d_after = kept, d_y, d_after
        self.d_pending, self.out = d_pending, outputs

    def tokens(self):
        return super().tokens() | {"d_y": self.d_y}

    def run(self):
        scratch, arrived = self.scratch, self.scratch["d_memory_arrived"]
        self.prepare()
        d_memory = scratch["d_memory"]
        plgpu.copy_gmem_to_smem(self.d_after.at[*self.at], d_memory, arrived)
        plgpu.barrier_wait(arrived)
        if self.out.empty is not None:
            self.out.empty[*self.at] = self.machine.zeros(d_memory.shape)
        whole, chunks = self.x.whole[self.at[0]], self.chunks
        lax.fori_loop(0, chunks, lambda i, _: self.chunk(chunks - 1 - i, whole), None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(d_memory, self.out.start.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def chunk(self, i, whole):
        scratch, (row, head) = self.scratch, self.at
        self.fetch(i)
        arrived = scratch["arrived"]
        kept = self.kept.at[row, i, head]
        plgpu.copy_gmem_to_smem(kept, scratch["operand"], arrived)
        plgpu.barrier_wait(arrived)
        plgpu.commit_smem()
        squares = self.again()
        pl.when(i < whole)(self.through_norms)

        @pl.when(i >= whole)
        def _():
            self.put("d_written", self.machine.global_matrix(self.d_pending, *self.at))

        plgpu.commit_smem()
        self.through_writes(*self.through_reads(), squares)
        self.give(i)

    def again(self):
        """The chunk, up to its queries."""
        write, along, before, squares = self.residuals()
        taken, size = self.sums(write, along, before, squares)
        for name, value in zip(
            ("along", "before", "taken", "size"),
            (along, before, taken, size),
            strict=True,
        ):
            self.put(name, value)
        self.put("query", self.matrix("q") * inverse_norm(size))
        plgpu.commit_smem()
        return squares

    def through_norms(self):
        """From the memory after the chunk to what is written, and to the one before."""
        written = self.machine.product(self.scratch["write"], self.scratch["h"], "tn")
        memory, d_after = self.matrix("operand"), self.matrix("d_memory")
        along = across_width(memory * written)
        after, scale = unit(memory + along * memory - written)
        d_rows = scale * (d_after - after * across_width(after * d_after))
        d_along = across_width(d_rows * memory)
        self.put("d_written", d_along * memory - d_rows)
        self.scratch["d_memory"][...] = d_rows + along * d_rows + d_along * written

    def through_reads(self):
        """Cotangents of W so far, of cwp and of n2; that of q takes its place."""
        scratch, machine = self.scratch, self.machine
        d_y, query, write = scratch["d_y"], scratch["query"], scratch["write"]
        d_past, d_scores, d_write, scores = machine.products(
            (d_y, scratch["operand"], "nt"),
            (d_y, scratch["h"], "nt"),
            (scratch["h"], scratch["d_written"], "nt"),
            (query, write, "nt"),
        )
        # Negated, so that products are added.
        self.put("scores", -self.masked(scores))
        self.put("d_scores", -self.masked(d_scores))
        left = 1.0 + self.matrix("taken")
        self.put("high", self.matrix("query") * left)
        plgpu.commit_smem()
        self.add_to_memory((scratch["high"], d_y, "tn"))
        d_query, more = machine.products(
            (scratch["d_scores"], write, "nn"), (scratch["d_scores"], query, "tn")
        )
        d_query = d_query + d_past * left
        size = self.matrix("size")
        scale = inverse_norm(size)
        q = self.matrix("q")
        d_size = -0.5 * scale * scale * scale * q * d_query
        d_size = jnp.where(size > 0.0, d_size, 0.0)
        d_taken = d_past * q * scale - 2.0 * self.matrix("taken") * d_size
        self.put("q", d_query * scale)
        return d_write + more, d_taken, d_size

    def through_writes(self, d_write, d_taken, d_size, squares):
        """Cotangents of gamma, k and v; those of the tokens take their place."""
        scratch, machine = self.scratch, self.machine
        operand, h, high, low = (scratch[n] for n in ("operand", "h", "high", "low"))
        d_taken = self.summed(d_taken, "tn")
        d_added = self.summed(d_size, "tn")
        along = self.matrix("along")
        gamma, target = self.slots(self.gamma()), self.target(along)
        write = gamma * target
        twice = 2.0 * d_added
        d_write = d_write + d_taken * along
        d_write = d_write + twice * (
            self.matrix("before") + write * self.slots(squares)
        )
        d_squares = jnp.sum(d_added * write * write, axis=1)
        self.put("high", twice * write)
        plgpu.commit_smem()
        d_gram, more = machine.products(
            (high, scratch["write"], "nt"), (scratch["gram"], high, "tn")
        )
        d_write = d_write + more
        self.put("gram", self.masked(d_gram, strictly=True))
        self.scratch["d_gamma"][...] = jnp.sum(d_write * target, axis=1)
        d_target = gamma * d_write
        d_along = d_taken * write
        if self.variant == "enc":
            d_along, d_target = d_along + d_target, -d_target
        self.put("low", d_along)
        plgpu.commit_smem()
        d_h = machine.total(
            (scratch["write"], scratch["d_written"], "nn"),
            (scratch["scores"], scratch["d_y"], "tn"),
            (scratch["gram"], h, "nn"),
            (scratch["gram"], h, "tn"),
            (low, operand, "nn"),
        )
        rows = mosaic.along_rows(d_squares, h.shape[-1])
        d_h = d_h + 2.0 * rows * self.matrix("h")
        self.put("v", d_h if self.variant == "enc" else -d_h)
        plgpu.commit_smem()
        self.add_to_memory((low, h, "tn"))
        if self.variant == "dec":
            # v now holds -h-, and h = k M - v.
            d_target = d_target - machine.product(scratch["v"], operand, "nt")
            self.add_to_memory((scratch["k"], scratch["v"], "tn"), sign=-1.0)
        self.put("k", d_target)
        plgpu.commit_smem()

    def add_to_memory(self, triple, sign=1.0):
        added = self.machine.product(*triple)
        self.scratch["d_memory"][...] = self.matrix("d_memory") + sign * added

    def give(self, i):
        """Copies gradients out, and stops that of a memory that was emptied."""
        scratch, (row, head) = self.scratch, self.at
        for name in ("q", "k", "v"):
            source = scratch[name].at[pl.ds(0, self.size)]
            target = getattr(self.out, name).at[row, i, :, head, :]
            plgpu.copy_smem_to_gmem(source, target)
        plgpu.copy_smem_to_gmem(scratch["d_gamma"], self.out.gamma.at[row, i, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.x.cleared is None:
            return

        @pl.when((i > 0) & (self.x.cleared[row, i] != 0))
        def _():
            before = self.machine.global_matrix(self.out.empty, *self.at)
            self.out.empty[*self.at] = before + self.matrix("d_memory")
            shape = scratch["d_memory"].shape
            scratch["d_memory"][...] = self.machine.zeros(shape)
