"""Trellis on a TPU: one kernel forward, one backward, memories in fast memory (VMEM).

Chunks whose tokens fill registers go through `tpu_packed`, smaller ones through
`tpu_small`. Where a gradient is taken, the memories that the forward kernel saves are
named "trellis_chunk_states" and the reads "trellis_reads": with a rematerialisation
policy that saves both, the forward kernel runs once.

The saved memories take 2 M (K + V) / C bytes a token and head in bfloat16. Those of
`tpu_small` take M (K + V) / 4, one memory per 16 tokens, in float32.
"""

from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.packs.blocks import ROWS, other_dtypes
from memjax_kernels._src.trellis import tpu_packed, tpu_small
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.xla import trellis_xla


def unsupported(q: Array, k: Array, v: Array, alpha: Array, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    if reason := other_dtypes(q, k, v):
        return reason
    if alpha.dtype.name not in ("float32", "bfloat16"):
        return f"alpha must be float32 or bfloat16, got {alpha.dtype}"
    if chunk_size % ROWS and ROWS % chunk_size:
        return f"chunk_size must divide {ROWS} or be a multiple of it, got {chunk_size}"
    heads, widths = q.shape[2], (q.shape[-1], v.shape[-1], alpha.shape[-1])
    if not _form(chunk_size, heads, widths):
        key_dim, value_dim, slots = widths
        fewest = 2 if chunk_size >= ROWS else 1
        return (
            f"no number of {heads} heads, from {fewest} on, of {slots} slots and "
            f"{key_dim} and {value_dim} channels fills rows of 128 each and fits in "
            "VMEM"
        )
    return ""


def trellis_tpu(
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`.

    `interpret` is that of `pallas_call`: False, or `pltpu.InterpretParams`.
    """
    options: Any = {"phi": phi, "activation": activation}
    _, _, size, heads, key_dim = tokens.q.shape
    form = _form(size, heads, (key_dim, tokens.v.shape[4], tokens.alpha.shape[4]))
    if form is None:
        # A device's share of the heads may fill no register.
        return trellis_xla(tokens, memory, empty, **options)
    return form(tokens, memory, empty, **options, interpret=interpret)


def _form(size: int, heads: int, widths: tuple[int, int, int]) -> Any:
    """The kernels for these sizes."""
    form = tpu_small if size < ROWS else tpu_packed
    fits = not ROWS % size if size < ROWS else not size % ROWS
    return form.in_chunks if fits and form.heads_of_pack(size, heads, widths) else None
