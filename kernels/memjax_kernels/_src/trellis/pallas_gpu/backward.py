"""The backward kernel of Trellis on a GPU: chunks in reverse, each computed again.

`chunk` has the arithmetic, `common.mosaic_programs` moves tokens and memories.
"""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static
from memjax_kernels._src.common.mosaic_programs import call
from memjax_kernels._src.trellis.pallas_gpu.chunk import Chunk
from memjax_kernels._src.trellis.pallas_gpu.inputs import Inputs, tokens_of


def backward(static: Static, x: Inputs, residuals, d_y, d_after) -> Inputs:
    """Runs the kernel.

    Args:
        static: as in the forward pass.
        x: likewise.
        residuals: memories at every chunk's start, from there.
        d_y: cotangent of y, like the others below.
        d_after: of the memories after the last full chunk.

    Returns:
        The cotangents of x. That of gates is two arrays: rows `TOTAL`, `LAST` and
        `GAMMA` of each pass, [B, n, H, 6, 64]; and per slot, what the last total gets
        from the memory, [B, n, H, 2, M].
    """
    b, n, _, h, _ = x.q.shape
    slots = x.alpha.shape[-1]

    def like(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    rows = jax.ShapeDtypeStruct((b, n, h, 6, ROWS), F32)
    last = jax.ShapeDtypeStruct((b, n, h, 2, slots), F32)
    outputs = jax.tree.map(like, x._replace(gates=None, whole=None, reset=None))
    outputs = outputs._replace(gates=(rows, last))
    x = x._replace(start=None, empty=None)
    given = residuals, d_y, d_after
    scratch, name = _scratch(x, slots), "memjax_trellis_backward"
    return call(_Program, static, x, given, outputs, scratch, name)


def _scratch(x: Inputs, slots: int):
    dtype, widths = x.q.dtype, [tokens.shape[-1] for tokens in x.inputs]

    def work(width, dtype=dtype):
        return mosaic.tile(ROWS, width, dtype=dtype)

    scratch = {
        "q": work(widths[0]),
        "alpha": work(slots),
        "d_y": work(widths[1]),
        "gates": mosaic.vectors(4, ROWS),
        "d_gates": mosaic.vectors(6, ROWS),
        "d_last": mosaic.vectors(2, slots),
        "scores1": work(ROWS),
        "d_scores": work(ROWS),
        "decayed": work(slots),
        "weighted": work(slots),
        "d_predicted": work(slots),
        "query": work(slots),
        "errors0": work(slots),
        "errors1": work(slots),
        "scores2": work(ROWS),
        # The reads of the first pass, then their cotangent.
        "reads": work(slots, F32),
        "arrived": plgpu.Barrier(num_arrivals=8),
        "memory_arrived": plgpu.Barrier(num_arrivals=2),
    }
    for i, width in enumerate(widths):
        scratch[f"inputs{i}"] = work(width)
        scratch[f"operand{i}"] = mosaic.tile(slots, width, dtype=dtype)
        scratch[f"d_memory{i}"] = mosaic.tile(slots, width, dtype=F32)
        scratch[f"d_operand{i}"] = mosaic.tile(slots, width, dtype=dtype)
    return scratch


class _Program(Chunk):
    """The kernel of one batch element and head."""

    def tokens(self):
        return super().tokens() | {"d_y": self.d_y}

    def gradients(self):
        rows, last = self.out.gates
        return tokens_of(self.out), {"d_gates": rows, "d_last": last}
