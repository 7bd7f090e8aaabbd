"""The linear ops on a TPU.

`packed`, `packed_gla`, `packed_delta` and `packed_kda` have the equations of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any

from memjax_kernels._src.common.packs.recurrence import recur
from memjax_kernels._src.common.packs.recurrence_chunk import Op
from memjax_kernels._src.linear import packed, packed_delta, packed_gla, packed_kda
from memjax_kernels._src.linear.chunks import linear_group, scan_groups
from memjax_kernels._src.linear.delta_chunks import delta_group, gdn2_group


def _in_xla(group: Callable[..., Any]) -> Callable[..., Any]:
    def form(q, k, v, g, beta, *rest, chunk_size):
        *rates, state = rest
        rates = rates if beta is None else [beta[..., None]]
        tokens = (q, k, v, *rates, g[..., None] if g.ndim < q.ndim else g)
        return scan_groups(group, tokens, state, None, chunk_size)

    return form


_LINEAR_IN_XLA = _in_xla(linear_group)
# Products with operands rounded to the tokens' dtype anyway.
LINEAR = Op("linear_attention", packed.advance, packed.vjp, _LINEAR_IN_XLA, exact=False)
GLA = Op("gla", packed_gla.advance, packed_gla.vjp, _LINEAR_IN_XLA, exact=False)
# Errors of the memory grow where a chunk is computed again from it.
DELTA = Op(
    "delta_rule",
    packed_delta.advance,
    packed_delta.vjp,
    _in_xla(delta_group),
    exact=True,
)
KDA = DELTA._replace(
    name="kda", advance=packed_kda.advance, vjp=packed_kda.vjp, mild=True
)
GDN2 = KDA._replace(name="gdn2", in_xla=_in_xla(gdn2_group))

linear_attention_tpu = functools.partial(recur, LINEAR, ())
ssd_tpu = functools.partial(recur, LINEAR, ("g",))
gla_tpu = functools.partial(recur, GLA, ("g",))
delta_rule_tpu = functools.partial(recur, DELTA, ("beta",))
gated_delta_rule_tpu = functools.partial(recur, DELTA, ("beta", "g"))
kda_tpu = functools.partial(recur, KDA, ("beta", "g"))
gdn2_tpu = functools.partial(recur, GDN2, ("erase", "write", "g"))
