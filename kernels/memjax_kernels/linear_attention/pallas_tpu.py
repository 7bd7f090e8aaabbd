"""Linear attention and SSD on a TPU: `packed` has the equations of a chunk."""

import functools

from memjax_kernels.common.packs import recurrence
from memjax_kernels.common.packs.recurrence_kernels import Op
from memjax_kernels.linear_attention import packed
from memjax_kernels.linear_attention.chunks import linear_group, scan_groups


def _in_xla(q, k, v, g, beta, state, *, chunk_size):
    del beta
    tokens = (q, k, v, g[..., None])
    return scan_groups(linear_group, tokens, state, None, chunk_size)


OP = Op(
    "linear_attention",
    packed.advance,
    packed.pull_back,
    _in_xla,
    # The operands of its products are rounded to the tokens' dtype anyway.
    exact=False,
)
recur_tpu = functools.partial(recurrence.recur, OP)
