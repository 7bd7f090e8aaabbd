"""Lattice on a Hopper GPU, in Mosaic: one kernel forward, one backward.

One program goes through all chunks of a batch element and head. Its memory stays in
shared memory, its products run on tensor cores (wgmma, bfloat16 operands, float32
sums). Where a gradient is taken, the forward kernel also saves the memory at every
chunk's start, in the tokens' dtype; the backward kernel goes through the chunks in
reverse and computes each again from there. The saved memories and the reads are named
"lattice_chunk_states" and "lattice_reads" for rematerialisation policies.

On an H200 they agree with the token loop as the XLA form in bfloat16 does; see
`experiments/speed`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import chunks, gradients, mosaic, varying
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.mosaic import ROWS, Static
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.pallas_gpu.backward import backward
from memjax_kernels._src.lattice.pallas_gpu.forward import forward
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs
from memjax_kernels._src.lattice.xla import lattice_xla


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can."""
    return rule.without_kernel or mosaic.unsupported(chunk_size, q=q, k=k, v=v)


def lattice_gpu(
    x: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = None
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`; `interpret` runs it in an interpreter."""
    arguments = chunks.float_flags(x), start, empty
    return _chunks(Static(rule, interpret), *varying.vary_alike(arguments))


def _prepared(x: Chunks, start, empty) -> ChunkInputs:
    x = chunks.bool_flags(x)
    q, k, v = x.tokens
    gamma = jnp.moveaxis(x.gates[0].astype(jnp.float32), 2, -1)
    # Padding of rate 0 writes nothing.
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, ROWS - gamma.shape[-1])])
    begin = mosaic.memories(x, start, empty)
    return ChunkInputs(q=q, k=k, v=v, gamma=gamma, **begin)


def _in_xla(static: Static, x, start, empty):
    return lattice_xla(chunks.bool_flags(x), start, empty, static.rule)


_chunks = gradients.of_prepared("lattice", _prepared, forward, backward, _in_xla)
