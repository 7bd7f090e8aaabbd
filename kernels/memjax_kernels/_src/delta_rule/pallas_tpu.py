"""The delta rule, gated or not, on a TPU: `packed` has the equations of a chunk."""

from typing import Any

from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.packs.recurrence_kernels import Op
from memjax_kernels._src.linear import packed_delta
from memjax_kernels._src.linear.delta_chunks import scan_chunks


def recur_tpu(q, k, v, beta, g, state, reset, *, interpret: Any = False):
    """The recurrence of `gated_delta_rule`, or of `delta_rule` for g of None."""
    return recurrence.recur(
        OP, q, k, v, g, state, reset, beta=beta, interpret=interpret
    )


def _in_xla(q, k, v, g, beta, state, *, chunk_size):
    return scan_chunks(q, k, v, beta, g, state, chunk_size=chunk_size)


# Errors of the memory grow where a chunk is computed again from it.
OP = Op("delta_rule", packed_delta.advance, packed_delta.pull_back, _in_xla, exact=True)
