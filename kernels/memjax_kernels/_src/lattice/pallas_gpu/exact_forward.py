"""The forward kernel of Lattice with C = 1 on a GPU: every token in turn."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32
from memjax_kernels._src.lattice.pallas_gpu.exact_program import (
    REDUCTIONS,
    Program,
    shared,
)
from memjax_kernels._src.lattice.pallas_gpu.inputs import (
    GROUP,
    GROUPS,
    Static,
    TokenInputs,
)
from memjax_kernels._src.lattice.pallas_gpu.program import call, l2_normalize


def forward(static: Static, x: TokenInputs, *, with_residuals: bool):
    """Runs the forward kernel.

    Returns:
        y [B, n, GROUP, H, V]; the memory after the last token; and if `with_residuals`
        the memory before every block [B, n / GROUPS, H, M, V], else None.
    """
    b, n, _, h, _ = x.q.shape
    m, width = x.start.shape[2:]
    blocks = jax.ShapeDtypeStruct((b, n // GROUPS, h, m, width), F32)
    outputs = (
        jax.ShapeDtypeStruct(x.v.shape, F32),
        jax.ShapeDtypeStruct(x.start.shape, F32),
        blocks if with_residuals else None,
    )
    scratch = shared(x) | {
        "arrived": plgpu.Barrier(num_arrivals=4),
        "memory": mosaic.tile(m, width, dtype=F32),
        "memory_arrived": plgpu.Barrier(),
        "reads": mosaic.vectors(GROUP, width),
    }
    name = "exact_forward"
    return call(_Forward, static, x, (), outputs, scratch, name, **REDUCTIONS)


class _Forward(Program):
    """The forward kernel of one batch element and head."""

    def __init__(self, static, x, outputs, scratch):
        super().__init__(static, x, scratch)
        self.y, self.after, self.residuals = outputs
        self.memory = scratch["memory"]

    def compute(self):
        arrived = self.scratch["memory_arrived"]
        plgpu.copy_gmem_to_smem(self.x.start.at[*self.at], self.memory, arrived)
        plgpu.barrier_wait(arrived)
        lax.fori_loop(0, self.groups, lambda i, _: self.group(i), None)
        plgpu.copy_smem_to_gmem(self.memory, self.after.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def group(self, i):
        row, head = self.at
        self.fetch(i)
        if self.residuals is not None:
            residuals = self.residuals.at[row, lax.div(i, GROUPS), head]

            @pl.when(lax.rem(i, GROUPS) == 0)
            def _():
                plgpu.copy_smem_to_gmem(self.memory, residuals)

        # Also what the group before gave.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lax.fori_loop(0, GROUP, lambda t, _: self.token(i, t), None)
        plgpu.commit_smem()
        target = self.y.at[row, i, :, head, :]
        plgpu.copy_smem_to_gmem(self.scratch["reads"], target)

    def token(self, i, t):
        self.clear(self.memory, i, t)
        written = self.write(self.ops.matrix(self.memory), t)
        query = self.by_slot("q", t) * written.scale
        self.scratch["reads"][t] = jnp.sum(self.rows(query) * written.rows, axis=0)
        self.memory[...] = l2_normalize(written.rows)[0]
