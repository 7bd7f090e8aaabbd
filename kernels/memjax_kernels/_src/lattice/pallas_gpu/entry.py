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

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.mosaic import ROWS
from memjax_kernels._src.common.mosaic_programs import kernels_of
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.pallas_gpu.backward import backward
from memjax_kernels._src.lattice.pallas_gpu.forward import forward
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs
from memjax_kernels._src.lattice.xla import lattice_xla


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any GPU; "" if they can."""
    return rule.without_kernel or mosaic.unsupported(chunk_size, q=q, k=k, v=v)


def prepare(x: Chunks, _: Rule) -> dict[str, Array]:
    """The kernels' inputs that depend on tokens alone."""
    q, k, v = x.tokens
    gamma = jnp.moveaxis(x.gates[0].astype(jnp.float32), 2, -1)
    # Padding of rate 0 writes nothing.
    gamma = jnp.pad(gamma, [(0, 0)] * 3 + [(0, ROWS - gamma.shape[-1])])
    return {"q": q, "k": k, "v": v, "gamma": gamma}


PARTS = "lattice", ChunkInputs, prepare, forward, backward, lattice_xla
lattice_gpu = kernels_of(*PARTS)
