"""The linear ops on a TPU.

`packed`, `packed_gla`, `packed_delta` and `packed_kda` have the equations of a chunk.
"""

import functools
from typing import Any

from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.packs.recurrence_chunk import Op
from memjax_kernels._src.linear import packed, packed_delta, packed_gla, packed_kda
from memjax_kernels._src.linear.chunks import linear_group, scan_groups
from memjax_kernels._src.linear.delta_chunks import delta_group, gdn2_group


def _linear_in_xla(q, k, v, g, beta, state, *, chunk_size):
    del beta
    tokens = (q, k, v, g[..., None] if g.ndim < q.ndim else g)
    return scan_groups(linear_group, tokens, state, None, chunk_size)


def _delta_in_xla(q, k, v, g, beta, state, *, chunk_size):
    tokens = (q, k, v, beta[..., None], g[..., None] if g.ndim < q.ndim else g)
    return scan_groups(delta_group, tokens, state, None, chunk_size)


def _gdn2_in_xla(q, k, v, g, beta, erase, write, state, *, chunk_size):
    del beta
    tokens = (q, k, v, erase, write, g)
    return scan_groups(gdn2_group, tokens, state, None, chunk_size)


# Products with operands rounded to the tokens' dtype anyway.
LINEAR = Op("linear_attention", packed.advance, packed.vjp, _linear_in_xla, exact=False)
GLA = Op("gla", packed_gla.advance, packed_gla.vjp, _linear_in_xla, exact=False)
# Errors of the memory grow where a chunk is computed again from it.
DELTA = Op(
    "delta_rule", packed_delta.advance, packed_delta.vjp, _delta_in_xla, exact=True
)
KDA = DELTA._replace(
    name="kda", advance=packed_kda.advance, vjp=packed_kda.vjp, mild=True
)
GDN2 = KDA._replace(name="gdn2", in_xla=_gdn2_in_xla)


def linear_attention_tpu(q, k, v, state, reset, *, interpret: Any = False):
    """`linear_attention` in kernels."""
    return recurrence.recur(LINEAR, q, k, v, None, state, reset, interpret=interpret)


def delta_rule_tpu(q, k, v, beta, state, reset, *, interpret: Any = False):
    """`delta_rule` in kernels."""
    return gated_delta_rule_tpu(q, k, v, beta, None, state, reset, interpret=interpret)


def gated_delta_rule_tpu(q, k, v, beta, g, state, reset, *, interpret: Any = False):
    """`gated_delta_rule` in kernels."""
    return recurrence.recur(
        DELTA, q, k, v, g, state, reset, beta=beta, interpret=interpret
    )


def kda_tpu(q, k, v, beta, g, state, reset, *, interpret: Any = False):
    """`kda` in kernels."""
    return recurrence.recur(
        KDA, q, k, v, g, state, reset, beta=beta, interpret=interpret
    )


def gdn2_tpu(q, k, v, erase, write, g, state, reset, *, interpret: Any = False):
    """`gdn2` in kernels."""
    rates = erase, write
    return recurrence.recur(
        GDN2, q, k, v, g, state, reset, rates=rates, interpret=interpret
    )


ssd_tpu = functools.partial(recurrence.recur, LINEAR)
gla_tpu = functools.partial(recurrence.recur, GLA)
