"""Trellis on a TPU: one kernel forward, one backward, memories in fast memory (VMEM).

Where a gradient is taken, the memories that the forward kernel saves and the reads have
the names `SAVED`: with a rematerialisation policy that saves both, the forward kernel
runs once. The saved memories take 2 M (K + V) / C bytes a token and head in bfloat16;
of chunks of fewer than 64 tokens those before a block of chunks alone are saved, and C
is the tokens of a block.
"""

from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.packs.blocks import ROWS, other_dtypes
from memjax_kernels._src.trellis import tpu_packed
from memjax_kernels._src.trellis.state import Rule
from memjax_kernels._src.trellis.xla import trellis_xla

SAVED = "trellis_tpu_chunk_states", "trellis_tpu_reads"


def unsupported(q: Array, k: Array, v: Array, alpha: Array, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    if reason := other_dtypes(q, k, v):
        return reason
    if alpha.dtype.name not in ("float32", "bfloat16"):
        return f"alpha must be float32 or bfloat16, got {alpha.dtype}"
    if chunk_size % ROWS:
        return f"chunk_size must be a multiple of {ROWS}, got {chunk_size}"
    heads, widths = q.shape[2], (q.shape[-1], v.shape[-1], alpha.shape[-1])
    if not tpu_packed.heads_of_pack(chunk_size, heads, widths):
        key_dim, value_dim, slots = widths
        return (
            f"no number of {heads} heads, from 2 on, of {slots} slots and {key_dim} "
            f"and {value_dim} channels fills rows of 128 each and fits in VMEM"
        )
    return ""


def trellis_tpu(
    x: Chunks,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    rule: Rule,
    *,
    interpret: Any = False,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`.

    `interpret` is that of `pallas_call`: False, or `pltpu.InterpretParams`.
    """
    size, heads = x.tokens[0].shape[2:4]
    if not tpu_packed.heads_of_pack(size, heads, tpu_packed.widths_of(x)):
        # A device's share of the heads may fill no register.
        return trellis_xla(x, memory, empty, rule)
    return tpu_packed.in_chunks(x, memory, empty, rule, interpret=interpret)
