"""Trellis on a TPU: one kernel forward, one backward, memories in fast memory (VMEM).

`packed` has the equations of a chunk, `tpu_packed_kernels` the kernels.

Where a gradient is taken, the memories that the forward kernel saves and the reads have
the names `SAVED`: with a rematerialisation policy that saves both, the forward kernel
runs once. The saved memories take 2 M (K + V) / C bytes a token and head in bfloat16;
of chunks of fewer than 64 tokens those before a block of chunks alone are saved, and C
is the tokens of a block.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.blocks import LANES, misfit
from memjax_kernels._src.common.packs.chunkwise import Op, kernels_of
from memjax_kernels._src.common.packs.layout import Layout, packings, plan
from memjax_kernels._src.trellis import tpu_packed_kernels
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.xla import trellis_xla

SAVED = "trellis_tpu_chunk_states", "trellis_tpu_reads"


def unsupported(q: Array, k: Array, v: Array, alpha: Array, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can.

    Only shapes and dtypes are looked at.
    """
    if reason := misfit(q, k, v, chunk_size):
        return reason
    if alpha.dtype.name not in ("float32", "bfloat16"):
        return f"alpha must be float32 or bfloat16, got {alpha.dtype}"
    heads, widths = q.shape[2], (q.shape[-1], v.shape[-1], alpha.shape[-1])
    if not heads_of_pack(chunk_size, heads, widths):
        key_dim, value_dim, slots = widths
        return (
            f"no number of {heads} heads, from 2 on, of {slots} slots and {key_dim} "
            f"and {value_dim} channels fills rows of 128 each and fits in VMEM"
        )
    return ""


def _layout(x: Chunks) -> Layout | None:
    size, number = x.tokens[0].shape[2:4]
    heads = heads_of_pack(size, number, [y.shape[4] for y in x.tokens[1:]])
    return plan(tuned.SIZES.trellis, x, heads) if heads else None


def heads_of_pack(size: int, heads: int, widths: Sequence[int]) -> int:
    """Heads of a pack: the most whose chunks fit in 128 lanes; 0 is none.

    Widths are those of keys and values, K and V, and the slots M.
    """
    # Two heads at least: nothing here is written for one.
    most = max(2, LANES // size)
    fitting = packings(tuned.SIZES.trellis, heads, size, widths)
    return max((number for number in fitting if 2 <= number <= most), default=0)


def _with_options(kernel):
    def run(*refs, layout, options, multiply):
        kernel(*refs, layout=layout, options=Options(*options, multiply=multiply))

    return run


def _of_gates(d: Float[Array, "B n C H _"], x: Chunks) -> tuple[Array, Array]:
    """Of gamma in its passes, then of g, as gradients of both gates."""
    gamma, g = x.gates
    d_gamma, d_g = jnp.split(d, [gamma.shape[-1]], axis=-1)
    # Gates clamped to the lowest have no gradient.
    return d_gamma, jnp.where(g > FORGETS_ALL, d_g, 0.0)


trellis_tpu = kernels_of(
    Op(
        "trellis",
        _layout,
        _with_options(tpu_packed_kernels.forward_kernel),
        _with_options(tpu_packed_kernels.backward_kernel),
        trellis_xla,
        # Memories are saved in the tokens' dtype, to which operands of products are
        # rounded.
        residuals=lambda dtype: (dtype, dtype),
        gate_rows=True,
        of_gates=_of_gates,
    )
)
