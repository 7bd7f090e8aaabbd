"""Which steps of jax's splash attention compute: read from its map of blocks.

The kernel's grid has every pair of blocks of queries and keys. A causal mask does not
shrink it: the last row of blocks needs all keys. A block that nobody sees is passed
over by a branch, in a step that does nothing else.
"""

import numpy as np

from memjax.aot.cycles.bundles import Shares
from memjax.mechanisms.layers.softmax import splash


def shares(heads: int, time: int) -> dict[str, Shares]:
    """In which share of its steps each of the kernels computes, begins and ends."""
    attention = splash.kernel(heads, time)
    infos = {
        "fwd": attention.fwd_mask_info,
        "dq": attention.dq_mask_info,
        "dkv": attention.dkv_mask_info,
    }
    share = lambda info: float(np.mean(np.asarray(info.block_mask) != 0))
    return {
        f"splash_mha_{name}": Shares(1 / np.asarray(x.block_mask).shape[-1], share(x))
        for name, x in infos.items()
    }
