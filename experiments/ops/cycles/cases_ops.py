"""Cases of the ops: forward, and forward with backward, of whole calls."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import memjax_kernels
from experiments.ops import cases, cost
from experiments.ops.cases import STALE, Shape
from experiments.ops.cost import Sizes
from experiments.ops.cycles.case import Case, Program
from memjax.aot.cycles.bundles import Shares
from memjax_kernels import LatticeVariant, overlap_with_keys

SHAPE = Shape(batch=8, time=2048, heads=12, width=64)
WIDE = Shape(batch=8, time=2048, heads=6, width=128)
#: What the test compiles again: one batch element, so that copies take little time.
SMALL = Shape(batch=1, time=512, heads=8, width=64)
#: Of the plot: T, with as many tokens in all.
LENGTHS = (2048, 4096, 8192, 16384)
PASSES = {"forward": False, "both": True}
BFLOAT16 = "bfloat16"
#: Ops that have no chunk size of the caller's.
PLAIN = tuple(op for op in cases.ARGUMENTS if op not in (*STALE, "attention"))


def program(op: str, shape: Shape, backward: bool, options: dict[str, Any]) -> Program:
    """An op's call on tokens in bfloat16, as it runs on a TPU by default.

    Tokens come as projections leave them, [B, T, H D], and reads go so to the next.

    Args:
        op: its name.
        shape: of the tokens.
        backward: whether the gradients of all arguments are results too.
        options: further keywords of the op.
    """
    function = getattr(memjax_kernels, op)

    def forward(*arrays: Array) -> Array:
        # Gates are [B, T, H] already.
        by_head = (x.reshape(y.shape) for x, y in zip(arrays, shaped, strict=True))
        return _flat(function(*by_head, **options)[1])

    arrays = jax.eval_shape(lambda: cases.inputs(op, shape, BFLOAT16))
    shaped = tuple(arrays[name] for name in cases.ARGUMENTS[op])
    given = jax.eval_shape(lambda *x: tuple(map(_flat, x)), *shaped)
    # Kernels read the memory at the first step and write it at the last. A step is a
    # chunk, or 16 tokens of smaller ones.
    chunk = options.get("chunk_size")
    shares = {op: Shares(ends=max(16, chunk) / shape.time if chunk else 1.0)}
    flops = _flops(op, shape, backward, **options)
    if not backward:
        return Program(forward, given, flops=flops, shares=shares)
    cotangent = jax.eval_shape(_flat, arrays["v"])
    whole = (cotangent, *given)
    return Program(cases.both(forward), whole, flops=flops, shares=shares)


def _flat(x: Array) -> Array:
    """[B, T, H, D] -> [B, T, H D]."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x


def case(
    op: str, shape: Shape, backward: bool, chip: str = "v5e", **options: Any
) -> Case:
    """A case of an op."""
    return Case(
        build=functools.partial(program, op, shape, backward, options),
        units=shape.batch * shape.time * shape.heads,
        chip=chip,
    )


def _flops(
    op: str,
    shape: Shape,
    backward: bool,
    chunk_size: int = 0,
    variant: LatticeVariant = "dec",
    **_: Any,
) -> float:
    """Operations by the op's formula."""
    b, t, h, d = shape
    sizes = Sizes(b, t, h, d, d, d, chunk_size, 2)
    formula = cost.COSTS[op]
    if op == "lattice":
        formula = functools.partial(cost.lattice, variant=variant)
    passes = (False, True) if backward else (False,)
    return sum(formula(sizes, direction).flops for direction in passes)


def overlap_program(backward: bool) -> Program:
    """The bounds of a pass of Trellis, of keys as projections leave them."""
    b, t, h, d = SHAPE

    def forward(k: Array, gamma: Array) -> tuple[Array, Array]:
        keys, left = overlap_with_keys(k.reshape(SHAPE), gamma, chunk_size=16)
        return keys.reshape(k.shape), left

    k = jax.ShapeDtypeStruct((b, t, h * d), jnp.bfloat16)
    gamma = jax.ShapeDtypeStruct((b, t, h), jnp.float32)
    if not backward:
        return Program(forward, (k, gamma))
    return Program(cases.both(forward), ((k, gamma), k, gamma))


def table() -> dict[str, Case]:
    """All cases of the ops by name."""
    found: dict[str, Case] = {}

    def add(name: str, op: str, shape: Shape = SHAPE, **options: Any) -> None:
        for direction, backward in PASSES.items():
            found[f"{name}/{direction}"] = case(op, shape, backward, **options)

    for size in (64, 16, 4, 1):
        add(f"trellis/c{size}", "trellis", chunk_size=size)
    for variant in ("dec", "sim"):
        for size in (16, 64, 1):
            add(
                f"lattice-{variant}/c{size}",
                "lattice",
                chunk_size=size,
                variant=variant,
            )
    for direction, backward in PASSES.items():
        build = functools.partial(overlap_program, backward)
        found[f"overlap/c16/{direction}"] = Case(build, math.prod(SHAPE[:3]))
    for op in PLAIN:
        add(op, op)
    add("ttt_linear/c16", "ttt_linear", chunk_size=16)
    for op in ("ssd", "gated_delta_rule", "gla", "gated_slots"):
        add(f"{op}/xla", op, implementation="xla")
    add("trellis/c64/xla", "trellis", chunk_size=64, implementation="xla")
    add("lattice-dec/c64/xla", "lattice", chunk_size=64, implementation="xla")
    for name, op in (("trellis", "trellis"), ("lattice-dec", "lattice")):
        add(f"{name}/c64/d128", op, WIDE, chunk_size=64)
        for chip in ("v6e", "v5p"):
            add(f"{name}/c64/{chip}", op, chip=chip, chunk_size=64)
        for time in LENGTHS[1:]:
            shape = SHAPE._replace(batch=8 * 2048 // time, time=time)
            add(f"{name}/c64/t{time}", op, shape, chunk_size=64)
        add(f"{name}/c64/small", op, SMALL, chunk_size=64)
    add("trellis/c4/small", "trellis", SMALL, chunk_size=4)
    return found
