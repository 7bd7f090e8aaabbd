"""Cases of causal attention: our kernel and jax's splash, at widths 64 and 128.

The grid of splash has every pair of blocks of queries and keys. The causal mask does
not shrink it: the last row of blocks needs all keys. A block above the diagonal is
passed over by a branch, in a step that does nothing else. The share of steps that
compute is read from the kernel's own map of blocks, and the bundles behind the branch
count so often. Ours has no other steps than those that compute.
"""

import functools

import jax
import jax.numpy as jnp

from experiments.ops import cases
from experiments.ops.cases import Shape
from experiments.ops.cycles.case import Case, Program
from memjax.aot.cycles.attention import shares
from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.layers.softmax import on_tpu

SHAPES = {
    (width, time): Shape(1, time, heads, width)
    for width, heads in ((64, 12), (128, 6))
    for time in (2048, 4096, 8192, 16384)
}


#: By the name of the case.
KERNELS = {"attention": on_tpu.attention, "splash": on_tpu.splash_attention}


def program(kernel: str, shape: Shape, backward: bool) -> Program:
    """Causal attention on tokens [B, T, H, D], as a layer has them."""
    b, t, h, d = shape
    token = jax.ShapeDtypeStruct((b, t, h, d), jnp.bfloat16)
    given = (token,) * (4 if backward else 3)
    function = cases.both(KERNELS[kernel]) if backward else KERNELS[kernel]
    flops = cases.cost("attention", shape, 0, "bfloat16", backward).flops
    layer = AttentionConfig(h * d, num_heads=h, num_kv_heads=h, head_dim=d)
    return Program(function, given, flops=flops, shares=shares((layer,), t))


def table() -> dict[str, Case]:
    """All cases of attention by name."""
    return {
        f"{kernel}/d{width}/t{shape.time}/{name}": Case(
            build=functools.partial(program, kernel, shape, backward),
            units=shape.batch * shape.time * shape.heads,
        )
        for kernel in KERNELS
        for (width, _), shape in SHAPES.items()
        # Ours has heads of 64.
        if kernel == "splash" or width == 64
        for name, backward in (("forward", False), ("both", True))
    }
