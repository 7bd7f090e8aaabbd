"""Lattice on a TPU: the memory stays in fast memory (VMEM), forward and backward.

Chunks whose tokens fill registers go through `tpu_packed`, single tokens through
`tpu_token`. Where a gradient is taken, the memories that the forward kernel saves are
named "lattice_chunk_states" and the reads "lattice_reads": with a rematerialisation
policy that saves both, the forward kernel runs once.
"""

from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.packs.blocks import ROWS, other_dtypes
from memjax_kernels._src.lattice import tpu_packed, tpu_token
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
    if chunk_size > 1 and chunk_size % ROWS:
        return f"chunk_size must be 1 or a multiple of {ROWS}, got {chunk_size}"
    (_, _, heads, slots), width = q.shape, v.shape[-1]
    if not _form(chunk_size, heads, slots, width):
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
    form = _form(size, heads, slots, tokens.v.shape[-1])
    if form is None:
        # A device's share of the heads may fill no register.
        return lattice_xla(tokens, start, empty, rule)
    return form(tokens, start, empty, rule, interpret=interpret)


def _form(size: int, heads: int, slots: int, width: int):
    """The kernels for these sizes."""
    if size == 1 and tpu_token.heads_of_pack(heads, slots, width):
        return tpu_token.lattice_tokens
    if size % ROWS == 0 and tpu_packed.heads_of_pack(size, heads, slots, width):
        return tpu_packed.lattice_packed
    return None
