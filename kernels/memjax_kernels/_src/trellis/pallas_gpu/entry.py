"""Trellis on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memories stay in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memories at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"trellis_chunk_states" and "trellis_reads" for rematerialisation policies.

On an H200 they agree with the token loop as the XLA form in bfloat16 does; see
`experiments/speed`.
"""

import jax.numpy as jnp

from memjax_kernels._src.common.mosaic import ROWS, Static
from memjax_kernels._src.common.mosaic_programs import kernels_of
from memjax_kernels._src.trellis.pallas_gpu.backward import backward
from memjax_kernels._src.trellis.pallas_gpu.forward import forward
from memjax_kernels._src.trellis.pallas_gpu.inputs import (
    GAMMA,
    LAST,
    TOTAL,
    Inputs,
    prepare,
)
from memjax_kernels._src.trellis.xla import trellis_xla


def _backward(static: Static, x: Inputs, residuals, d_y, d_after) -> Inputs:
    d = backward(static, x, residuals, d_y, d_after)
    rows, last = d.gates
    rows = rows.reshape(*rows.shape[:3], 2, 3, ROWS)
    last = jnp.sum(rows[..., LAST, :], axis=-1) + jnp.sum(last, axis=-1)
    # The kernels take the last sum from the last of their rows.
    total = rows[..., TOTAL, :].at[..., -1].add(last)
    gates = jnp.stack([total, rows[..., GAMMA, :]], axis=-2)
    return d._replace(gates=gates.reshape(x.gates.shape))


PARTS = "trellis", Inputs, prepare, forward, _backward, trellis_xla
trellis_gpu = kernels_of(*PARTS)
