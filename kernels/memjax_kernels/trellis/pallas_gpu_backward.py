"""The backward kernel of Trellis on a GPU: chunks in reverse, each computed again.

Per pass, with x its input, M the memory at the chunk's start, R the one read from (the
same but in the first chunk), N the one after, and U, W, cs as in `segment`; a bar
denotes a cotangent, and q is the query of the pass, y1 of the first:

    w = exp(cs_C - cs)      A = (q x^T) * W, or (q U^T) * W in the second
    first:   A- = -(y- U^T) * W    q- = (e^cs y-) R + A- x        U- = -A^T y- - ...
             x- = A-^T q - (w U) N- + Z- M                R- = e^cs_C N- + (e^cs y-)^T q
    second:  A- = -(y- x^T) * W    q- = e^cs (y- R^T) + A- U      U- = A-^T q - ...
             x- = -A^T y- - (w U) N- + Z- M               R- = e^cs_C N- + (e^cs q)^T y-
    U- = ... - w (x N-^T)    Z-, alpha- = vjp of the error's gradient     M- = Z-^T x
    cs- = <q, q-> - gamma gamma-, and in the chunk's last token the sums over it of
    -w <U, x N-^T> and over the memory of e^cs_C <N-, R>
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels import mosaic
from memjax_kernels.mosaic import F32, ROWS, Machine
from memjax_kernels.trellis import functions
from memjax_kernels.trellis.pallas_gpu import Inputs, Sizes, Static
from memjax_kernels.trellis.pallas_gpu_forward import decays

# Rows of the gradients of gates, for each pass.
TOTAL, LAST, GAMMA = range(3)


class Gradients(NamedTuple):
    """What the kernel gives.

    Attributes:
        q: as the tokens, like the next two.
        inputs: of each pass.
        alpha: of the targets.
        gates: rows `TOTAL`, `LAST` and `GAMMA` of each pass [B, n, H, 3 P, 64].
        last: per slot, what the last total gets from the memory [B, n, H, P, M].
        running: memories [B, H, M, D] float32, like the next two.
        begin: None if not given.
        empty: None if not given.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any
    last: Any
    running: Any
    begin: Any
    empty: Any


def backward(static: Static, x: Inputs, kept, d_y, d_after, d_middle) -> Gradients:
    """Runs the kernel.

    Args:
        static: as in the forward pass.
        x: likewise.
        kept: memories at every chunk's start, from there.
        d_y: cotangent of y, like the others below.
        d_after: of the memories after the last chunk.
        d_middle: of those at the start of chunk `middle`.
    """
    b, n, _, h, _ = x.q.shape
    sizes = x.sizes
    passes = len(sizes.widths)
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    memory = tuple(map(like, x.running))
    outputs = Gradients(
        q=like(x.q),
        inputs=tuple(map(like, x.inputs)),
        alpha=like(x.alpha),
        gates=jax.ShapeDtypeStruct((b, n, h, 3 * passes, ROWS), F32),
        last=jax.ShapeDtypeStruct((b, n, h, passes, sizes.slots), F32),
        running=memory,
        begin=None if x.begin is None else memory,
        empty=None if x.empty is None else memory,
    )
    # Of the memories before the first chunk only the ones read from are needed here.
    running = None
    if x.begin is not None:
        running = [r.astype(x.q.dtype) for r in x.running]
    x = x._replace(begin=None, running=running, empty=None)
    given, tree = jax.tree.flatten((x, kept, d_y, d_after, d_middle))
    out_types, out_tree = jax.tree.flatten(outputs)

    def body(*refs, **scratch):
        given_refs: Any = jax.tree.unflatten(tree, refs[: len(given)])
        out_refs = jax.tree.unflatten(out_tree, refs[len(given) :])
        _Program(static, sizes, given_refs, out_refs, scratch).run()

    run = mosaic.call(
        body,
        (b, h),
        out_types,
        _scratch(sizes, x.q.dtype, d_y.shape[-1], running is None),
        "memjax_trellis_backward",
        static.interpret,
    )
    return jax.tree.unflatten(out_tree, run(*given))


def _scratch(sizes: Sizes, dtype, read: int, aligned: bool):
    slots, widths = sizes.slots, sizes.widths
    passes = len(widths)
    work = lambda width, dtype=dtype: mosaic.tile(ROWS, width, dtype=dtype)
    scratch = {
        "q": work(widths[0]),
        "alpha": work(slots),
        "d_y": work(read),
        "gates": mosaic.vectors(2 * passes, ROWS),
        "d_gates": mosaic.vectors(3 * passes, ROWS),
        "d_last": mosaic.vectors(passes, slots),
        "scores1": work(ROWS),
        "d_scores": work(ROWS),
        "decayed": work(slots),
        "weighted": work(slots),
        "d_predicted": work(slots),
        # The reads of the first pass, then their cotangent.
        "reads": work(slots, F32),
        "arrived": plgpu.Barrier(num_arrivals=4 + 2 * passes),
        "memory_arrived": plgpu.Barrier(num_arrivals=passes),
    }
    if passes == 2:
        scratch |= {name: work(slots) for name in ("query", "errors1")}
        scratch["scores2"] = work(ROWS)
    for i, width in enumerate(widths):
        scratch[f"inputs{i}"] = work(width)
        copies = 1 if aligned else 2
        scratch[f"memory{i}"] = mosaic.tile(copies, slots, width, dtype=dtype)
        scratch[f"d_memory{i}"] = mosaic.tile(slots, width, dtype=F32)
        scratch[f"d_operand{i}"] = mosaic.tile(slots, width, dtype=dtype)
    scratch["errors0"] = work(slots)
    return scratch


class _Program:
    """The kernel of one row and head."""

    def __init__(self, static, sizes, given, outputs, scratch):
        self.static, self.sizes = static, sizes
        self.x, self.kept, self.d_y, self.d_after, self.d_middle = given
        self.out = outputs
        self.scratch = scratch
        self.machine = Machine(static.interpret)
        self.at = lax.axis_index("rows"), lax.axis_index("heads")
        self.passes = range(len(sizes.widths))
        self.operands = [scratch[f"memory{i}"].at[0] for i in self.passes]

    def each(self, name):
        return [self.scratch[f"{name}{i}"] for i in self.passes]

    def run(self):
        scratch, arrived = self.scratch, self.scratch["memory_arrived"]
        for memory, given in zip(self.each("d_memory"), self.d_after, strict=True):
            plgpu.copy_gmem_to_smem(given.at[*self.at], memory, arrived)
        plgpu.barrier_wait(arrived)
        if self.x.running is not None:
            for memory, given in zip(self.each("memory"), self.x.running, strict=True):
                plgpu.copy_gmem_to_smem(given.at[*self.at], memory.at[1], arrived)
            plgpu.barrier_wait(arrived)
        for i, out in enumerate(self.out.empty or ()):
            out[*self.at] = self.machine.zeros(scratch[f"d_memory{i}"].shape)
        if self.sizes.size < ROWS:
            for ref in self.tokens():
                ref[...] = self.machine.zeros(ref.shape, ref.dtype)
            plgpu.commit_smem()
        chunks = self.sizes.chunks
        middle = self.x.middle[self.at[0]]
        lax.fori_loop(0, chunks, lambda i, _: self.chunk(chunks - 1 - i, middle), None)
        plgpu.commit_smem()
        for memory, out in zip(self.each("d_memory"), self.out.running, strict=True):
            plgpu.copy_smem_to_gmem(memory, out.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def tokens(self):
        scratch = self.scratch
        return scratch["q"], scratch["alpha"], scratch["d_y"], *self.each("inputs")

    def fetch(self, i):
        (row, head), x = self.at, self.x
        arrived, place = self.scratch["arrived"], pl.ds(0, self.sizes.size)
        sources = (x.q, x.alpha, self.d_y, *x.inputs)
        for source, target in zip(sources, self.tokens(), strict=True):
            plgpu.copy_gmem_to_smem(
                source.at[row, i, :, head, :], target.at[place], arrived
            )
        plgpu.copy_gmem_to_smem(
            x.gates.at[row, i, head], self.scratch["gates"], arrived
        )
        for source, target in zip(self.kept, self.operands, strict=True):
            plgpu.copy_gmem_to_smem(source.at[row, i, head], target, arrived)

    def chunk(self, i, middle):
        row, head = self.at
        self.fetch(i)
        for operand, memory in zip(
            self.each("d_operand"), self.each("d_memory"), strict=True
        ):
            operand[...] = self.machine.matrix(memory).astype(operand.dtype)
        plgpu.barrier_wait(self.scratch["arrived"])
        plgpu.commit_smem()
        d_query = self.compute(i)
        self.pass_on(i, middle)
        # Gradients take the place of the tokens.
        scratch = self.scratch
        scratch["q"][...] = d_query.astype(scratch["q"].dtype)
        plgpu.commit_smem()
        place = pl.ds(0, self.sizes.size)
        outputs = (self.out.q, self.out.alpha, *self.out.inputs)
        sources = (scratch["q"], scratch["alpha"], *self.each("inputs"))
        for source, out in zip(sources, outputs, strict=True):
            plgpu.copy_smem_to_gmem(source.at[place], out.at[row, i, :, head, :])
        plgpu.copy_smem_to_gmem(scratch["d_gates"], self.out.gates.at[row, i, head])
        plgpu.copy_smem_to_gmem(scratch["d_last"], self.out.last.at[row, i, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def compute(self, i):
        """Gradients of a chunk; those of inputs replace them, that of q is returned."""
        self.again_first()
        if len(self.passes) == 1:
            return self.first(i, self.scratch["d_y"])
        self.again_query(i)
        self.second(i)
        query, reads = self.scratch["query"], self.scratch["reads"]
        query[...] = self.machine.matrix(reads).astype(query.dtype)
        return self.first(i, query)

    def again_first(self):
        """Errors and scores of the first pass, as in the forward kernel."""
        scratch, machine = self.scratch, self.machine
        q, x = scratch["q"], scratch["inputs0"]
        predicted, scores = machine.products((x, self.operands[0], "nt"), (q, x, "nt"))
        _, gamma, _ = self.gates(0)
        error = self.error(predicted) * mosaic.along_rows(gamma, self.sizes.slots)
        scratch["errors0"][...] = error.astype(q.dtype)
        scores = self.decays(0) * scores
        scratch["scores1"][...] = scores.astype(q.dtype)
        plgpu.commit_smem()

    def again_query(self, i):
        """Reads of the first pass, and the query of the second."""
        scratch = self.scratch
        past, new = self.machine.products(
            (scratch["q"], self.read_from(0, i), "nt"),
            (scratch["scores1"], scratch["errors0"], "nn"),
        )
        total, _, _ = self.gates(0)
        reads = mosaic.along_rows(jnp.exp(total), self.sizes.slots) * past - new
        scratch["reads"][...] = reads
        scratch["query"][...] = self.activate(reads).astype(scratch["query"].dtype)
        plgpu.commit_smem()

    def second(self, i):
        """The second pass; leaves the cotangent of the first one's reads in `reads`."""
        scratch, machine, slots = self.scratch, self.machine, self.sizes.slots
        query, x, d_y = scratch["query"], scratch["inputs1"], scratch["d_y"]
        d_scores, errors = scratch["d_scores"], scratch["errors1"]
        predicted = machine.product(x, self.operands[1], "nt")
        total, gamma, last = self.gates(1)
        kept = mosaic.along_rows(jnp.exp(total), slots)
        error = self.error(predicted) * mosaic.along_rows(gamma, slots)
        errors[...] = error.astype(errors.dtype)
        self.put("weighted", kept * machine.matrix(query))
        plgpu.commit_smem()
        scores, d_score, d_past, d_decayed = machine.products(
            (query, errors, "nt"),
            (d_y, x, "nt"),
            (d_y, self.read_from(1, i), "nt"),
            (x, scratch["d_operand1"], "nt"),
        )
        decays_ = self.decays(1)
        self.put("scores2", decays_ * scores)
        self.put("d_scores", -(decays_ * d_score))
        plgpu.commit_smem()
        through, d_error = machine.products(
            (d_scores, errors, "nn"), (d_scores, query, "tn")
        )
        d_query = kept * d_past + through
        d_total = jnp.sum(machine.matrix(query) * d_query, axis=1)
        reads = machine.matrix(scratch["reads"])
        _, scratch["reads"][...] = mosaic.pull(self.activate, (reads,), d_query)
        d_x, d_alpha = self.write(
            i, 1, predicted, d_error, d_decayed, d_total, (scratch["weighted"], d_y)
        )
        direct = machine.product(scratch["scores2"], d_y, "tn")
        x[...] = (d_x - direct).astype(x.dtype)
        self.put("errors1", d_alpha)

    def first(self, i, d_y):
        """The first pass, given its reads' cotangent as a tile; returns that of q."""
        scratch, machine, slots = self.scratch, self.machine, self.sizes.slots
        q, x, d_scores = scratch["q"], scratch["inputs0"], scratch["d_scores"]
        total, _, _ = self.gates(0)
        kept = mosaic.along_rows(jnp.exp(total), slots)
        source = d_y if len(self.passes) == 1 else scratch["reads"]
        self.put("weighted", kept * machine.matrix(source))
        plgpu.commit_smem()
        predicted, d_score, d_decayed = machine.products(
            (x, self.operands[0], "nt"),
            (d_y, scratch["errors0"], "nt"),
            (x, scratch["d_operand0"], "nt"),
        )
        self.put("d_scores", -(self.decays(0) * d_score))
        plgpu.commit_smem()
        through, past = machine.products(
            (d_scores, x, "nn"), (scratch["weighted"], self.read_from(0, i), "nn")
        )
        d_q = through + past
        d_total = jnp.sum(machine.matrix(q) * d_q, axis=1)
        d_error = -machine.product(scratch["scores1"], d_y, "tn")
        d_x, d_alpha = self.write(
            i, 0, predicted, d_error, d_decayed, d_total, (scratch["weighted"], q)
        )
        direct = machine.product(d_scores, q, "tn")
        x[...] = (d_x + direct).astype(x.dtype)
        if len(self.passes) == 2:
            d_alpha = d_alpha + machine.matrix(scratch["errors1"])
        self.put("alpha", d_alpha)
        return d_q

    def write(self, i, index, predicted, d_error, d_decayed, d_total, change):
        """The write of a pass: gates, its memory, and what inputs and alpha get.

        Args:
            i: the chunk.
            index: the pass.
            predicted: Z.
            d_error: cotangent of U but for its part from the memory after the chunk.
            d_decayed: x N-^T.
            d_total: <q, q-> of every token.
            change: tiles whose x^T y reaches R through the reads.

        Returns:
            Cotangents of x, but for its part from the reads, and of alpha.
        """
        scratch, machine, slots = self.scratch, self.machine, self.sizes.slots
        total, gamma, last = self.gates(index)
        left = mosaic.along_rows(jnp.exp(last - total), slots)
        step = mosaic.along_rows(gamma, slots)
        d_error = d_error - left * d_decayed
        alpha = machine.matrix(scratch["alpha"])
        error, d_predicted, d_alpha = mosaic.pull(
            self.error_of, (predicted, alpha), step * d_error
        )
        d_gamma = jnp.sum(error * d_error, axis=1)
        decayed = left * step * error
        rows = scratch["d_gates"].at[pl.ds(3 * index, 3)]
        rows[TOTAL] = d_total - gamma * d_gamma
        rows[LAST] = -jnp.sum(decayed * d_decayed, axis=1)
        rows[GAMMA] = d_gamma
        self.put("decayed", decayed)
        self.put("d_predicted", d_predicted)
        plgpu.commit_smem()
        self.pass_memory(i, index, change, jnp.exp(last))
        lost, through = machine.products(
            (scratch["decayed"], scratch[f"d_operand{index}"], "nn"),
            (scratch["d_predicted"], self.operands[index], "nn"),
        )
        return through - lost, d_alpha

    def pass_memory(self, i, index, change, kept):
        """The cotangent of a memory, from after the chunk to before it."""
        machine, d_memory = self.machine, self.scratch[f"d_memory{index}"]
        x = self.scratch[f"inputs{index}"]
        read, start = machine.products(
            (*change, "tn"), (self.scratch["d_predicted"], x, "tn")
        )
        after = kept * machine.matrix(d_memory)
        before = machine.matrix(self.read_from(index, i))
        self.scratch["d_last"][index] = jnp.sum(after * before, axis=1)
        if self.x.running is not None:
            begin = self.out.begin[index]

            @pl.when(i == 0)
            def _():
                begin[*self.at] = start

            start = jnp.where(i == 0, 0.0, 1.0) * start
        d_memory[...] = after + read + start

    def pass_on(self, i, middle):
        """What else the memories at the chunk's start have been used for."""
        machine = self.machine

        @pl.when((i > 0) & (i == middle))
        def _():
            for memory, given in zip(self.each("d_memory"), self.d_middle, strict=True):
                more = machine.global_matrix(given, *self.at)
                memory[...] = machine.matrix(memory) + more

        if self.x.cleared is None:
            return

        @pl.when((i > 0) & (self.x.cleared[self.at[0], i] != 0))
        def _():
            for memory, out in zip(self.each("d_memory"), self.out.empty, strict=True):
                before = machine.global_matrix(out, *self.at)
                out[*self.at] = before + machine.matrix(memory)
                memory[...] = machine.zeros(memory.shape)

    def read_from(self, index, i):
        """The memory that the first chunk's queries read is another one."""
        if self.x.running is None:
            return self.operands[index]
        return self.scratch[f"memory{index}"].at[jnp.where(i == 0, 1, 0)]

    def put(self, name, value):
        self.scratch[name][...] = value.astype(self.scratch[name].dtype)

    def gates(self, index):
        """Sums of g, gamma, and the last sum."""
        gates = self.scratch["gates"]
        total = self.machine.row_vector(gates, 2 * index)
        gamma = self.machine.row_vector(gates, 2 * index + 1)
        return total, gamma, gates[2 * index, ROWS - 1]

    def decays(self, index):
        gates = self.scratch["gates"]
        total = self.machine.row_vector(gates, 2 * index)
        other = self.machine.column_vector(gates, 2 * index)
        return decays(self.machine, total, other, self.sizes.size)

    def error(self, predicted):
        return self.error_of(predicted, self.machine.matrix(self.scratch["alpha"]))

    def error_of(self, predicted, alpha):
        return functions.error_gradient(
            self.static.phi, predicted, alpha, mosaic.over_slots
        )

    def activate(self, reads):
        return functions.apply(self.static.activation, reads, mosaic.over_slots)
