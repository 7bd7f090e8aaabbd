"""Lattice on a TPU: the memory stays in fast memory (VMEM), forward and backward.

Where a gradient is taken, the memories that the forward kernel saves are named
"lattice_tpu_chunk_states" and the reads "lattice_tpu_reads": with a rematerialisation
policy that saves both, the forward kernel runs once.
"""

from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.packs.blocks import ROWS, other_dtypes
from memjax_kernels._src.lattice import tpu_packed
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.xla import lattice_xla


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if reason := other_dtypes(q, k, v):
        return reason
    if not rule.normalize:
        return f"normalize must be True, got {rule.normalize}"
    if rule.forget is not None:
        return f"forget must be None, got {rule.forget!r}"
    if chunk_size % ROWS:
        return f"chunk_size must be a multiple of {ROWS}, got {chunk_size}"
    (_, _, heads, slots), width = q.shape, v.shape[-1]
    if not tpu_packed.heads_of_pack(chunk_size, heads, slots, width):
        return (
            f"no number of {heads} heads of {slots} slots and {width} channels fills "
            "rows of 128 each and fits in VMEM"
        )
    return ""


def lattice_tpu(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`; `interpret` as in `pallas_call`."""
    _, _, size, heads, slots = tokens.q.shape
    if not tpu_packed.heads_of_pack(size, heads, slots, tokens.v.shape[-1]):
        # A device's share of the heads may fill no register.
        return lattice_xla(tokens, start, empty, rule)
    return tpu_packed.lattice_packed(tokens, start, empty, rule, interpret=interpret)
