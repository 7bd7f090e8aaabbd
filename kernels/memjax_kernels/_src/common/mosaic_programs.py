"""Shared parts of the GPU kernels: loads and stores of tokens and memories.

One program takes all chunks of one batch element and head. Its memories stay in shared
memory in float32; products read a copy in the dtype of the tokens, which the forward
kernel also saves of every chunk's start for a gradient. The backward kernel takes the
chunks in reverse, and gradients overwrite the tokens.

An op brings its inputs, a named tuple with `q` [B, n, C, H, K] and what `_memories`
makes, and the arithmetic of a chunk. It has scratch called "arrived"
and "memory_arrived"; tiles by the names of `tokens` and `vectors`; "reads" in the
forward kernel; and for each memory "memory", or "d_memory" in the backward kernel, and
"operand", with a number behind each where there are several.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import PyTree

from memjax_kernels._src.common import chunks, gradients, mosaic
from memjax_kernels._src.common.chunks import Chunks, count_full, replace
from memjax_kernels._src.common.mosaic import ROWS, Static, TileOps
from memjax_kernels._src.common.varying import vary_alike


def _memories(x: Chunks, start: PyTree, empty: PyTree) -> dict[str, Any]:
    """Inputs that the chunks' flags decide: `start`, `empty`, `whole` and `reset`.

    The first chunk's reset is applied here: kernels fetch `empty` for later ones alone.
    """
    reset, empty = x.reset, None if x.reset is None else empty
    if reset is not None:
        start = replace(reset[:, 0], empty, start)
        reset = reset.astype(jnp.int32)
    return {"start": start, "empty": empty, "reset": reset, "whole": count_full(x)}


def kernels_of(
    name: str,
    inputs: Callable[..., Any],
    prepare: Callable[..., dict[str, Any]],
    forward: Callable[..., tuple[Any, Any, Any]],
    backward: Callable[..., Any],
    form: Callable[..., Any],
) -> Callable[..., Any]:
    """A chunk implementation by two kernels (see `common.steps.segment`).

    Args:
        name: of the op.
        inputs: the class of the kernels' inputs.
        prepare: (chunks, rule) -> all of them but `_memories`, by name. Its vjp is
            taken.
        forward: the kernel (static, inputs, with_residuals=) -> (y, memory, residuals).
        backward: the kernel (static, inputs, residuals, d_y, d_memory) -> cotangents of
            the inputs, None of `whole` and `reset`.
        form: the same function by XLA, (chunks, memory, empty, rule) -> (memory, y).
    """
    indices = ("whole", "reset")

    def apart(static, x, memory, empty):
        x = chunks.bool_flags(x)
        x = inputs(**prepare(x, static.rule), **_memories(x, memory, empty))
        flags = {name: getattr(x, name) for name in indices}
        return x._replace(**dict.fromkeys(indices)), flags

    def run(static, *primals, with_residuals):
        floats, flags = apart(static, *primals)
        x = floats._replace(**flags)
        y, memory, residuals = forward(static, x, with_residuals=with_residuals)
        return vary_alike((((memory, y), residuals), primals))[0]

    def back(static, primals, residuals, cotangents):
        d_memory, d_y = cotangents
        of_arrays = functools.partial(apart, static)
        floats, pull, flags = jax.vjp(of_arrays, *primals, has_aux=True)
        d = backward(static, floats._replace(**flags), residuals, d_y, d_memory)
        # A gradient must vary over the axes of a mesh that its argument varies over.
        return pull(vary_alike((d, primals))[0])

    def in_xla(static, x, memory, empty):
        return form(chunks.bool_flags(x), memory, empty, static.rule)

    op = gradients.of_kernels(name, run, back, in_xla)

    def implementation(x: Chunks, memory, empty, rule, *, interpret: Any = None):
        arguments = chunks.float_flags(x), memory, empty
        return op(Static(rule, interpret), *vary_alike(arguments))

    return implementation


def call(program, static: Static, x, more, outputs, scratch, name) -> Any:
    """Runs a kernel: program(static, *refs of x and more, refs of outputs, scratch)."""

    def run(*refs):
        program(static, *refs).all_chunks()

    return mosaic.call(run, (x, *more), outputs, scratch, name, static.interpret)


class Program:
    """One batch element and head in both kernels."""

    #: Chunks of tokens in shared memory at a time.
    stages = 1

    def __init__(self, static: Static, x, scratch):
        self.rule, self.x, self.scratch = static.rule, x, scratch
        self.ops = TileOps(static.interpret)
        self.at = lax.axis_index("batch"), lax.axis_index("heads")
        self.chunks, self.size = x.q.shape[1:3]

    def tokens(self) -> dict[str, Any]:
        """Tokens [B, n, C, H, D] by the names of their tiles."""
        raise NotImplementedError

    def vectors(self) -> dict[str, Any]:
        """Rates and gates [B, n, H, ...] likewise."""
        raise NotImplementedError

    def chunk(self, i, whole):
        """Chunk number i, of which the first `whole` are full."""
        raise NotImplementedError

    def each(self, name):
        """The scratch of this name, of each memory."""
        return [ref for key, ref in self.scratch.items() if key.rstrip("01") == name]

    def staged(self, name, i):
        """The scratch of a chunk's tokens."""
        ref = self.scratch[name]
        return ref if self.stages == 1 else ref.at[lax.rem(i, self.stages)]

    def clear(self):
        """Zeros in rows that no token fills, which enter products."""
        if self.size == ROWS:
            return
        for name in self.tokens():
            for stage in range(self.stages):
                ref = self.staged(name, jnp.int32(stage))
                ref[...] = self.ops.zeros(ref.shape, ref.dtype)
        plgpu.commit_smem()

    def fetch(self, i):
        """Begins the copies of a chunk's tokens."""
        (row, head), arrived = self.at, self.staged("arrived", i)
        for name, source in self.tokens().items():
            target = self.staged(name, i).at[pl.ds(0, self.size)]
            plgpu.copy_gmem_to_smem(source.at[row, i, :, head, :], target, arrived)
        for name, source in self.vectors().items():
            target = self.staged(name, i)
            plgpu.copy_gmem_to_smem(source.at[row, i, head], target, arrived)

    def fetch_memories(self, name, source):
        arrived = self.scratch["memory_arrived"]
        # All threads have written the memories that these replace.
        plgpu.commit_smem()
        for memory, given in zip(self.each(name), jax.tree.leaves(source), strict=True):
            plgpu.copy_gmem_to_smem(given.at[*self.at], memory, arrived)
        plgpu.barrier_wait(arrived)

    def in_order(self, numbers, name, outputs):
        """All chunks by their numbers, then the memories of this name copied out."""
        whole = self.x.whole[self.at[0]]
        lax.fori_loop(0, self.chunks, lambda i, _: self.chunk(numbers(i), whole), None)
        plgpu.commit_smem()
        for memory, out in zip(self.each(name), jax.tree.leaves(outputs), strict=True):
            plgpu.copy_smem_to_gmem(memory, out.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def is_reset(self, i):
        """Whether chunk i > 0 starts from `empty`; False for the first chunk."""
        return (i > 0) & (self.x.reset[self.at[0], i] != 0)

    def store(self, name, value):
        self.scratch[name][...] = value.astype(self.scratch[name].dtype)

    def matrix(self, name):
        return self.ops.matrix(self.scratch[name])


class Forward(Program):
    """The forward kernel; `outputs` are y, memories after the last chunk, and saved."""

    def __init__(self, static: Static, x, outputs, scratch):
        super().__init__(static, x, scratch)
        self.y, self.after, self.saved = outputs

    def all_chunks(self):
        self.clear()
        self.fetch_memories("memory", self.x.start)
        self.fetch(jnp.int32(0))
        self.in_order(lambda i: i, "memory", self.after)

    def begin(self, i):
        """The memories at the chunk's start, as operands and as residuals."""
        if self.x.reset is not None:
            empty = self.x.empty
            pl.when(self.is_reset(i))(lambda: self.fetch_memories("memory", empty))
        plgpu.wait_smem_to_gmem(0)
        operands = self.each("operand")
        for memory, operand in zip(self.each("memory"), operands, strict=True):
            operand[...] = self.ops.matrix(memory).astype(operand.dtype)
        plgpu.commit_smem()
        # None are saved where no gradient is taken.
        saved = jax.tree.leaves(self.saved)
        for operand, out in zip(operands, saved, strict=False):
            plgpu.copy_smem_to_gmem(operand, out.at[self.at[0], i, self.at[1]])

    def write(self, i, reads):
        """Copies the reads out."""
        self.store("reads", reads)
        plgpu.commit_smem()
        source = self.scratch["reads"].at[pl.ds(0, self.size)]
        target = self.y.at[self.at[0], i, :, self.at[1], :]
        plgpu.copy_smem_to_gmem(source, target)


class Backward(Program):
    """The backward kernel; `outputs` have the names of the inputs."""

    def __init__(self, static: Static, x, residuals, d_y, d_after, outputs, scratch):
        super().__init__(static, x, scratch)
        self.saved, self.d_y, self.d_after = residuals, d_y, d_after
        self.out = outputs

    def compute(self, full):
        """Gradients of a chunk in the place of its tokens, and those of memories."""
        raise NotImplementedError

    def gradients(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Outputs by the names of the scratch: those like tokens, and the others."""
        raise NotImplementedError

    def all_chunks(self):
        self.clear()
        self.fetch_memories("d_memory", self.d_after)
        # A sum over resets, which may be none.
        for memory, out in zip(
            self.each("d_memory"), jax.tree.leaves(self.out.empty), strict=False
        ):
            out[*self.at] = self.ops.zeros(memory.shape)
        self.in_order(lambda i: self.chunks - 1 - i, "d_memory", self.out.start)

    def fetch(self, i):
        super().fetch(i)
        saved, arrived = jax.tree.leaves(self.saved), self.scratch["arrived"]
        for source, target in zip(saved, self.each("operand"), strict=True):
            source = source.at[self.at[0], i, self.at[1]]
            plgpu.copy_gmem_to_smem(source, target, arrived)

    def chunk(self, i, whole):
        self.fetch(i)
        plgpu.barrier_wait(self.scratch["arrived"])
        plgpu.commit_smem()
        self.compute(i < whole)
        plgpu.commit_smem()
        (row, head), (tokens, others) = self.at, self.gradients()
        for name, out in tokens.items():
            source = self.scratch[name].at[pl.ds(0, self.size)]
            plgpu.copy_smem_to_gmem(source, out.at[row, i, :, head, :])
        for name, out in others.items():
            plgpu.copy_smem_to_gmem(self.scratch[name], out.at[row, i, head])
        # Only until the tiles have been read: the next chunk's tokens overwrite them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.x.reset is not None:
            pl.when(self.is_reset(i))(self.pass_to_empty)

    def pass_to_empty(self):
        """Cotangents of memories that were emptied stop here."""
        empty = jax.tree.leaves(self.out.empty)
        for memory, out in zip(self.each("d_memory"), empty, strict=True):
            # Rare, so that the slow way serves and takes no shared memory.
            before = self.ops.global_matrix(out, *self.at)
            out[*self.at] = before + self.ops.matrix(memory)
            memory[...] = self.ops.zeros(memory.shape)
