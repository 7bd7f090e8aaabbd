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

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import chunks, gradients, varying
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.mosaic import ROWS, Static
from memjax_kernels._src.trellis.pallas_gpu.backward import backward
from memjax_kernels._src.trellis.pallas_gpu.forward import forward
from memjax_kernels._src.trellis.pallas_gpu.inputs import (
    GAMMA,
    LAST,
    TOTAL,
    Inputs,
    prepare,
)
from memjax_kernels._src.trellis.segment import as_written
from memjax_kernels._src.trellis.state import Rule
from memjax_kernels._src.trellis.xla import trellis_xla


def trellis_gpu(
    x: Chunks,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    rule: Rule,
    *,
    interpret: Any = None,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`. `interpret` runs it in an interpreter."""
    x, rule = as_written(x, rule), Rule(rule.phi, rule.activation)
    arguments = chunks.float_flags(x), memory, empty
    results: Any = _chunks(Static(rule, interpret), *varying.vary_alike(arguments))
    return results


def _backward(static: Static, x: Inputs, residuals, d_y, d_after) -> Inputs:
    d = backward(static, x, residuals, d_y, d_after)
    rows, last = d.gates
    rows = rows.reshape(*rows.shape[:3], 2, 3, ROWS)
    last = jnp.sum(rows[..., LAST, :], axis=-1) + jnp.sum(last, axis=-1)
    # The kernels take the last sum from the last of their rows.
    total = rows[..., TOTAL, :].at[..., -1].add(last)
    gates = jnp.stack([total, rows[..., GAMMA, :]], axis=-2)
    return d._replace(gates=gates.reshape(x.gates.shape))


def _in_xla(static: Static, x: Chunks, memory, empty):
    return trellis_xla(chunks.bool_flags(x), memory, empty, static.rule)


_chunks = gradients.of_prepared("trellis", prepare, forward, _backward, _in_xla)
