"""Cases of the ops, of attention, and of norms, convolutions and layouts next to them.

Each is a whole call, forward, and forward with backward.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import memjax_kernels
from experiments.lab import ops
from experiments.lab.ops import Shape
from experiments.tpu.case import Case, Program, shape
from memjax.aot.cycles.attention import shares
from memjax.aot.cycles.bundles import Shares
from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.layers.softmax import on_tpu
from memjax_kernels import overlap_with_keys
from memjax_kernels._src import heads, recurrent_block

SHAPE = Shape(batch=8, time=2048, heads=12, width=64)
WIDE = Shape(batch=8, time=2048, heads=6, width=128)
#: What a test compiles again: one batch element, so that copies take little time.
SMALL = Shape(batch=1, time=512, heads=8, width=64)
#: Of the plot: T, with as many tokens in all.
LENGTHS = (2048, 4096, 8192, 16384)
PASSES = {"forward": False, "both": True}
#: Ops that have no chunk size of the caller's.
PLAIN = tuple(op for op in ops.ARGUMENTS if op not in (*ops.CHUNKED, "attention"))
#: Causal attention by the name of the case, with the heads of its widths.
ATTENTION: dict[str, tuple[Callable[..., Array], dict[int, int]]] = {
    "attention": (on_tpu.attention, {64: 12}),
    "splash": (on_tpu.splash_attention, {64: 12, 128: 6}),
}


def units(of: Shape) -> int:
    """Tokens of all heads."""
    return of.batch * of.time * of.heads


def program(op: str, of: Shape, backward: bool, **options: Any) -> Program:
    """An op's call on bfloat16 tokens, as it runs on a TPU by default.

    Tokens come as projections leave them, [B, T, H D], and reads go so to the next.

    Args:
        op: its name.
        of: sizes of the tokens.
        backward: whether the gradients of all arguments are results too.
        options: further keywords of the op.
    """
    function = getattr(memjax_kernels, op)
    arrays = jax.eval_shape(lambda: ops.inputs(op, of, "bfloat16"))
    shaped = tuple(arrays[name] for name in ops.ARGUMENTS[op])

    def forward(*arrays: Array) -> Array:
        # Gates are [B, T, H] already.
        by_head = (x.reshape(y.shape) for x, y in zip(arrays, shaped, strict=True))
        return _flat(function(*by_head, **options)[1])

    given = jax.eval_shape(lambda *x: tuple(map(_flat, x)), *shaped)
    # Kernels read the memory at the first step and write it at the last. A step is a
    # chunk, or 16 tokens of smaller ones.
    chunk = options.get("chunk_size")
    ends = {op: Shares(ends=max(16, chunk) / of.time if chunk else 1.0)}
    variant = options.get("variant", "dec")
    flops = ops.cost(op, of, chunk or 0, "bfloat16", backward, variant).flops
    if not backward:
        return Program(forward, given, flops=flops, shares=ends)
    whole = (jax.eval_shape(_flat, arrays["v"]), *given)
    return Program(ops.with_gradients(forward), whole, flops=flops, shares=ends)


def _flat(x: Array) -> Array:
    """[B, T, H, D] -> [B, T, H D]."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x


def attention(kernel: str, of: Shape, backward: bool) -> Program:
    """Causal attention on tokens [B, T, H, D], as a layer has them.

    The grid of splash has every pair of blocks of queries and keys, those above the
    diagonal too, which a branch passes over: the kernel's own map of blocks says in
    which share of the steps it computes. Ours has no such steps.
    """
    token = shape(*of)
    function = ATTENTION[kernel][0]
    flops = ops.cost("attention", of, 0, "bfloat16", backward).flops
    width = of.heads * of.width
    layer = AttentionConfig(
        width, num_heads=of.heads, num_kv_heads=of.heads, head_dim=of.width
    )
    return Program(
        ops.with_gradients(function) if backward else function,
        (token,) * (4 if backward else 3),
        flops=flops,
        shares=shares((layer,), of.time),
    )


def overlap(backward: bool) -> Program:
    """The bounds of a pass of Trellis, of keys as projections leave them."""

    def forward(k: Array, gamma: Array) -> tuple[Array, Array]:
        keys, left = overlap_with_keys(k.reshape(SHAPE), gamma, chunk_size=16)
        return keys.reshape(k.shape), left

    b, t, h, d = SHAPE
    given = (shape(b, t, h * d), shape(b, t, h, dtype=jnp.float32))
    if not backward:
        return Program(forward, given)
    return Program(ops.with_gradients(forward), (given, *given))


def _beside() -> dict[str, tuple[Callable[..., Array], tuple[Any, ...]]]:
    """Calls next to memories by name, with the arguments behind the tokens."""
    b, t, h, k = SHAPE
    parameters = functools.partial(shape, dtype=jnp.float32)
    angles = parameters(t, k // 2)
    return {
        "short_convolution": (
            recurrent_block.short_convolution,
            (parameters(4, h, k), parameters(b, 3, h, k)),
        ),
        "gated_norm": (
            lambda y, gate, scale, **options: recurrent_block.gated_norm(
                y, gate.reshape(SHAPE), scale, 1e-5, **options
            ),
            (shape(b, t, h * k), parameters(k)),
        ),
        "l2_normalize": (recurrent_block.l2_normalize, ()),
        "rotate": (heads.rotate, (angles, angles)),
    }


def beside(name: str, backward: bool, **options: Any) -> Program:
    """A call on tokens [B, T, H K], or with its gradients."""
    b, t, h, k = SHAPE
    call, more = _beside()[name]

    def forward(x: Array, *arrays: Array) -> Array:
        return call(x.reshape(SHAPE), *arrays, **options).reshape(x.shape)

    flat = shape(b, t, h * k)
    if backward:
        return Program(ops.with_gradients(forward), (flat, flat, *more))
    return Program(forward, (flat, *more))


def layout(first: bool) -> Program:
    """Heads before tokens, or back; the empty half of the lanes is moved as well."""
    b, t, h, k = SHAPE
    moved = 3 * b * t * h * k * 2.0
    if first:
        given = (shape(b, t, h * k),)
        return Program(
            lambda x: heads.heads_first(x.reshape(SHAPE)), given, bytes=moved
        )
    return Program(
        lambda x: heads.heads_last(x).reshape(b, t, h * k),
        (shape(b, h, t, k),),
        bytes=moved,
    )


def _named() -> Iterator[tuple[str, Callable[..., Program], Shape, str]]:
    """Name, (backward) -> program, sizes and chip of all cases with both passes."""

    def op(
        name: str, op: str, of: Shape = SHAPE, chip: str = "v5e", **options: Any
    ) -> tuple[str, Callable[..., Program], Shape, str]:
        def build(backward: bool) -> Program:
            return program(op, of, backward, **options)

        return name, build, of, chip

    for size in (64, 16, 4, 1):
        yield op(f"trellis/c{size}", "trellis", chunk_size=size)
    for variant in ("dec", "sim"):
        for size in (16, 64, 1):
            name = f"lattice-{variant}/c{size}"
            yield op(name, "lattice", chunk_size=size, variant=variant)
    yield "overlap/c16", overlap, SHAPE, "v5e"
    for plain in PLAIN:
        yield op(plain, plain)
    yield op("ttt_linear/c16", "ttt_linear", chunk_size=16)
    for plain in ("ssd", "gated_delta_rule", "gla", "gated_slots"):
        yield op(f"{plain}/xla", plain, implementation="xla")
    pairs = (("trellis", "trellis"), ("lattice-dec", "lattice"))
    for name, which in pairs:
        at = f"{name}/c64"
        yield op(f"{at}/xla", which, chunk_size=64, implementation="xla")
    for name, which in pairs:
        at = f"{name}/c64"
        yield op(f"{at}/d128", which, WIDE, chunk_size=64)
        for chip in ("v6e", "v5p"):
            yield op(f"{at}/{chip}", which, chip=chip, chunk_size=64)
        for time in LENGTHS[1:]:
            of = SHAPE._replace(batch=8 * 2048 // time, time=time)
            yield op(f"{at}/t{time}", which, of, chunk_size=64)
        yield op(f"{at}/small", which, SMALL, chunk_size=64)
    yield op("trellis/c4/small", "trellis", SMALL, chunk_size=4)
    for kernel, (_, widths) in ATTENTION.items():
        for width, count in widths.items():
            for time in LENGTHS:
                of = Shape(1, time, count, width)
                build = functools.partial(attention, kernel, of)
                yield f"{kernel}/d{width}/t{time}", build, of, "v5e"


def table() -> dict[str, Case]:
    """All cases of this file by name."""
    found: dict[str, Case] = {}
    for name, build, of, chip in _named():
        for direction, backward in PASSES.items():
            made = functools.partial(build, backward)
            found[f"{name}/{direction}"] = Case(made, units(of), chip=chip)
    for name in _beside():
        for direction, backward in PASSES.items():
            for form, options in (("", {}), ("/xla", {"implementation": "xla"})):
                made = functools.partial(beside, name, backward, **options)
                found[f"{name}{form}/{direction}"] = Case(made, units(SHAPE))
    for name, first in (("heads_first", True), ("heads_last", False)):
        found[f"{name}/forward"] = Case(functools.partial(layout, first), units(SHAPE))
    return found
