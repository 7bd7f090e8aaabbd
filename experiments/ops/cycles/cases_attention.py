"""Cases of causal attention: jax's splash kernel, at widths 64 and 128.

Its grid has every pair of blocks of queries and keys. The causal mask does not shrink
it: the last row of blocks needs all keys. A block above the diagonal is passed over by
a branch, in a step that does nothing else. The share of steps that compute is read
from the kernel's own map of blocks, and the bundles behind the branch count so often.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jaxtyping import Array

from experiments.ops import cases
from experiments.ops.cases import Shape
from experiments.ops.cycles.bundles import Shares
from experiments.ops.cycles.case import Case, Program

#: Queries and keys of a block of every kernel; other sizes have not been counted.
BLOCK = 512
SHAPES = {
    (width, time): Shape(1, time, heads, width)
    for width, heads in ((64, 12), (128, 6))
    for time in (2048, 4096, 8192, 16384)
}


def kernel(shape: Shape, block: int) -> splash.SplashAttentionKernel:
    """Splash attention of one batch element: q, k and v [H, T, D]."""
    heads = masks.MultiHeadMask(
        [masks.CausalMask((shape.time, shape.time))] * shape.heads
    )
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        heads, block_sizes=sizes, head_shards=1, q_seq_shards=1
    )


def shares(attention: splash.SplashAttentionKernel, blocks: int) -> dict[str, Shares]:
    """In which share of its steps each of the kernels computes, begins and ends."""
    infos = {
        "fwd": attention.fwd_mask_info,
        "dq": attention.dq_mask_info,
        "dkv": attention.dkv_mask_info,
    }
    share = lambda info: float(np.mean(np.asarray(info.block_mask) != 0))
    return {n: Shares(1 / blocks, share(x)) for n, x in infos.items() if x is not None}


def program(shape: Shape, backward: bool, block: int = BLOCK) -> Program:
    """Causal attention on tokens [B, T, H, D], as a layer has them."""
    attention = kernel(shape, block)

    def forward(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * shape.width**-0.5, k, v))
        attended: Any = jax.vmap(attention)(q, k, v)
        return jnp.swapaxes(attended, 1, 2)

    b, t, h, d = shape
    token = jax.ShapeDtypeStruct((b, t, h, d), jnp.bfloat16)
    given = (token,) * (4 if backward else 3)
    function = cases.both(forward) if backward else forward
    flops = cases.cost("attention", shape, 0, "bfloat16", backward).flops
    blocks = shares(attention, t // block)
    return Program(function, given, flops=flops, shares=blocks)


def table() -> dict[str, Case]:
    """All cases of attention by name."""
    return {
        f"splash/d{width}/t{shape.time}/{name}": Case(
            build=functools.partial(program, shape, backward),
            units=shape.batch * shape.time * shape.heads,
        )
        for (width, _), shape in SHAPES.items()
        for name, backward in (("forward", False), ("both", True))
    }
