"""Linear attention, SSD and GLA on a TPU.

`packed` has the equations of a chunk, and those of GLA stand in `packed_gla`.
"""

import functools

from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.packs.recurrence_kernels import Op
from memjax_kernels._src.linear import packed, packed_gla
from memjax_kernels._src.linear.chunks import linear_group, scan_groups


def _in_xla(q, k, v, g, beta, state, *, chunk_size):
    del beta
    tokens = (q, k, v, g[..., None] if g.ndim < q.ndim else g)
    return scan_groups(linear_group, tokens, state, None, chunk_size)


# The operands of their products are rounded to the tokens' dtype anyway.
OP = Op("linear_attention", packed.advance, packed.pull_back, _in_xla, exact=False)
GLA = Op("gla", packed_gla.advance, packed_gla.pull_back, _in_xla, exact=False)
recur_tpu = functools.partial(recurrence.recur, OP)
gla_tpu = functools.partial(recurrence.recur, GLA)
