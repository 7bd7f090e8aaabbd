"""Shares of the grid steps in which kernels of causal attention compute and begin.

Splash attention has a step for every pair of blocks of queries and keys, and skips a
fully masked block by a branch, according to its map of blocks. Our kernels have no such
steps, but code for each kind of step. That which computes a block of queries again,
where scores lie too far apart, does not count.
"""

from collections.abc import Iterable

import numpy as np

from memjax.aot.cycles.bundles import Shares
from memjax.mechanisms import MechanismConfig
from memjax.mechanisms.layers.softmax import on_tpu
from memjax_kernels._src.causal_attention import blocks, grid


def shares(
    mechanisms: Iterable[MechanismConfig], time: int, ways: int = 1
) -> dict[str, Shares]:
    """The shares of each kernel, by the beginning of its name.

    For two mechanisms with the same kernel the larger ones: cycles are an upper bound.

    Args:
        mechanisms: of a model; those without attention have none.
        time: tokens of a row.
        ways: number of devices that share the heads.
    """
    found: dict[str, Shares] = {}
    for mechanism in set(mechanisms):
        for name, share in _of_mechanism(mechanism, time, ways).items():
            found[name] = _larger(found.get(name, share), share)
    return found


def _larger(one, other):
    # Kernels of one name and different kinds of steps: each step counts with all code.
    alike = len(one.bodies) == len(other.bodies)
    bodies = tuple(map(max, one.bodies, other.bodies)) if alike else ()
    longest = max(one.longest, other.longest)
    return Shares(max(one.ends, other.ends), longest, bodies)


def _of_mechanism(mechanism, time, ways):
    if mechanism.attention is not mechanism:
        return {}
    heads = max(1, mechanism.num_heads // ways)
    block = mechanism.tokens_per_call
    if mechanism.plain_attention is None and block % blocks.LANES:
        # No kernel takes such a block.
        return {}
    if mechanism.name == "elastic_memory":
        return _of_splash(on_tpu.memory_kernel(heads, block, mechanism.samples)[0])
    # A window as long as the row is full attention.
    window = block if block and block < time else None
    if mechanism.plain_attention is None:
        # Full attention inside of each block.
        time, window = block, None
    return _of_splash(on_tpu.kernel(heads, time, window)) | _of_ours(time, window)


def _of_splash(attention):
    infos = {
        "fwd": attention.fwd_mask_info,
        "dq": attention.dq_mask_info,
        "dkv": attention.dkv_mask_info,
    }

    def share(info):
        return float(np.mean(np.asarray(info.block_mask) != 0))

    return {
        f"splash_mha_{name}": Shares(1 / np.asarray(x.block_mask).shape[-1], share(x))
        for name, x in infos.items()
    }


def _of_ours(time, window):
    found = {}
    for name, by_key in (("forward", False), ("backward", True)):
        plan = blocks.plan(time, window, by_key)
        # As many blocks begin as end.
        begins = float(np.mean(plan.steps.last))
        kinds = np.bincount(plan.steps.kind) / len(plan.steps.kind)
        found[grid.kernel_name(name, window)] = Shares(
            begins,
            longest=1.0 if by_key else 0.0,
            # Without another kind there is no branch.
            bodies=tuple(map(float, kinds)) if len(kinds) > 1 else (),
        )
    return found
