"""In which share of their steps the kernels of causal attention compute and begin.

Splash has a step for every pair of blocks of queries and keys, and passes over a block
that nobody sees by a branch, in a step that does nothing else: its own map of blocks
says where. Ours has no such steps.
"""

import numpy as np

from memjax.aot.cycles.bundles import Shares
from memjax.mechanisms.layers.softmax import on_tpu
from memjax_kernels.causal_attention import blocks


def shares(heads: int, time: int) -> dict[str, Shares]:
    """The shares of each kernel, by the beginning of its name."""
    attention = on_tpu.kernel(heads, time)
    infos = {
        "fwd": attention.fwd_mask_info,
        "dq": attention.dq_mask_info,
        "dkv": attention.dkv_mask_info,
    }
    share = lambda info: float(np.mean(np.asarray(info.block_mask) != 0))
    found = {
        f"splash_mha_{name}": Shares(1 / np.asarray(x.block_mask).shape[-1], share(x))
        for name, x in infos.items()
    }
    for name, by_key in (("forward", False), ("backward", True)):
        plan = blocks.plan(time, None, by_key)
        begins = float(np.mean(plan.steps.first))
        found[f"causal_attention_{name}"] = Shares(begins)
    return found
