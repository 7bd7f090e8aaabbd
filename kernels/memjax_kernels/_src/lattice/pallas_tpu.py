"""Lattice on a TPU: the memory stays in fast memory (VMEM), forward and backward.

`packed` and `packed_gradient` have the equations of a chunk, `common.packs.chunkwise`
the kernels. Where a gradient is taken, the memories that the forward kernel saves are
named "lattice_tpu_chunk_states" and the reads "lattice_tpu_reads": with a
rematerialisation policy that saves both, the forward kernel runs once. Memories are
saved in the dtype of the tokens, to which the operands of products are rounded anyway.
"""

import functools

from jaxtyping import Array

from memjax_kernels._src.common.packs.chunk_kernels import Equations, PackedOp
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.lattice import packed, packed_gradient
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.packed import Options
from memjax_kernels._src.lattice.xla import lattice_xla


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    return rule.without_kernel or _op.unsupported(q, k, v, chunk_size)


def _equations(rule: Rule, heads: int, multiply: Multiply) -> Equations:
    options = Options(rule.variant, heads, multiply)
    advance = functools.partial(packed.advance, options=options)
    vjp = functools.partial(packed_gradient.vjp, options=options)
    return Equations(advance, vjp)


_op = PackedOp("lattice", _equations, lattice_xla, lambda dtype: dtype)
lattice_tpu = _op.kernels
