"""Cases of the ops and of causal attention.

Each is a whole call, forward, and forward with backward.
"""

import functools
import itertools
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

SHAPE = Shape(batch=8, time=2048, heads=12, width=64)
WIDE = Shape(batch=8, time=2048, heads=6, width=128)
#: What a test compiles again: one batch element, so that copies take little time.
SMALL = Shape(batch=1, time=512, heads=8, width=64)
#: Of causal attention.
LENGTHS = (2048, 8192, 16384)
V5E, PASSES = "v5e", {"forward": False, "both": True}
#: Ops that have no chunk size of the caller's.
PLAIN = tuple(op for op in ops.ARGUMENTS if op not in (*ops.CHUNKED, "attention"))
#: Chips that no test compiles an op's kernels for.
OTHER_CHIPS = {"linear_attention": "v6e", "ssd": "v5p", "gla": "v6e"}
OTHER_CHIPS |= {"delta_rule": "v6e", "gated_delta_rule": "v5p", "gated_slots": "v5p"}
#: Causal attention by the name of the case.
ATTENTION: dict[str, Callable[..., Array]] = {
    "attention": on_tpu.attention,
    "splash": on_tpu.splash_attention,
}


def program(
    op: str,
    of: Shape,
    backward: bool,
    peer: Callable[..., Any] | None = None,
    dtype: str = "bfloat16",
    mild: float = 1.0,
    **options: Any,
) -> Program:
    """An op's call, as it runs on a TPU by default, or a peer's of the same arguments.

    Tokens come as projections leave them, [B, T, H D], and reads go so to the next.
    With `backward` the gradients of all arguments are results too. `mild` is the share
    of chunks that forget little, for which KDA and GDN-2 have a shorter code.
    """
    function = peer or getattr(memjax_kernels, op)
    arrays = jax.eval_shape(lambda: ops.inputs(op, of, dtype))
    shaped = tuple(arrays[name] for name in ops.ARGUMENTS[op])

    def forward(*arrays: Array) -> Array:
        # Gates are [B, T, H] already.
        by_head = (x.reshape(y.shape) for x, y in zip(arrays, shaped, strict=True))
        return _flat(function(*by_head, **options)[1])

    given = jax.eval_shape(lambda *x: tuple(map(_flat, x)), *shaped)
    # Kernels read the memory at the first step, and write it at the last.
    chunk = options.get("chunk_size")
    share = chunk / of.time if chunk else 1.0
    codes = (mild, 1 - mild) if op in ("kda", "gdn2") and not peer else ()
    ends = {op: Shares(ends=share, bodies=codes)}
    flops = ops.cost(op, of, chunk or 0, "bfloat16", backward).flops
    if not backward:
        return Program(forward, given, flops=flops, shares=ends)
    whole = (jax.eval_shape(_flat, arrays["v"]), *given)
    return Program(ops.with_gradients(forward), whole, flops=flops, shares=ends)


def _flat(x: Array) -> Array:
    """[B, T, H, D] -> [B, T, H D]."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x


def of_logits(op: str, of: Shape, inside: bool, backward: bool) -> Program:
    """An op with gates of channels, behind the product that makes their logits.

    `inside`: gates are the kernels', else XLA's. Most chunks forget little.
    """
    arrays = jax.eval_shape(lambda: ops.inputs(op, of, "bfloat16"))
    names = [name for name in ops.ARGUMENTS[op] if name != "g"]
    shaped = [arrays[name] for name in names]
    gates = arrays["g"].shape
    heads, width = gates[2:]

    def forward(*given: Array) -> Array:
        *tokens, inner, widen, bias, log_rate = given
        tokens = (x.reshape(y.shape) for x, y in zip(tokens, shaped, strict=True))
        z = (inner @ widen).reshape(gates)
        decay = memjax_kernels.Decay(log_rate, bias.reshape(heads, width))
        g = z if inside else decay.log_gates(z)
        options = {"decay": decay} if inside else {}
        return _flat(getattr(memjax_kernels, op)(*tokens, g, **options)[1])

    weights = shape(*gates[:2], width), shape(width, heads * width)
    learned = (shape(n, dtype=jnp.float32) for n in (heads * width, heads))
    tokens = jax.eval_shape(lambda *x: tuple(map(_flat, x)), *shaped)
    given = (*tokens, *weights, *learned)
    found = program(op, of, backward)._replace(function=forward, arguments=given)
    if not backward:
        return found
    whole = (jax.eval_shape(_flat, arrays["v"]), *given)
    return found._replace(function=ops.with_gradients(forward), arguments=whole)


def attention(kernel: str, of: Shape, backward: bool) -> Program:
    """Causal attention on tokens as projections leave them, [B, T, H D].

    The grid of splash has every pair of blocks of queries and keys, those above the
    diagonal too: its own map of blocks says in which share of the steps it computes.
    """
    width = of.heads * of.width
    token = shape(of.batch, of.time, width)

    def function(*tokens: Array) -> Array:
        return _flat(ATTENTION[kernel](*(x.reshape(of[:4]) for x in tokens)))

    flops = ops.cost("attention", of, 0, "bfloat16", backward).flops
    layer = AttentionConfig(width, of.heads, of.heads, of.width)
    return Program(
        ops.with_gradients(function) if backward else function,
        (token,) * (4 if backward else 3),
        flops=flops,
        shares=shares((layer,), of.time),
    )


def _named() -> Iterator[tuple[str, Callable[..., Program], Shape, str]]:
    """Name, (backward) -> program, sizes and chip of all cases with both passes."""

    def op(
        name: str, op: str, of: Shape = SHAPE, chip: str = V5E, **options: Any
    ) -> tuple[str, Callable[..., Program], Shape, str]:
        def build(backward: bool) -> Program:
            return program(op, of, backward, **options)

        return name, build, of, chip

    for size in (64, 16):
        yield op(f"trellis/c{size}", "trellis", chunk_size=size)
    for size in (16, 64):
        yield op(f"lattice-dec/c{size}", "lattice", chunk_size=size)
    for plain in PLAIN:
        yield op(plain, plain)
    for plain in ("kda", "gdn2"):
        yield op(f"{plain}_strong", plain, mild=0.0)
    yield op("ttt_linear/c16", "ttt_linear", chunk_size=16)
    for plain in ("ssd", "gated_delta_rule", "gla", "gated_slots"):
        yield op(f"{plain}/xla", plain, implementation="xla")
    qwen = Shape(1, 8192, 32, 128, key_heads=16)
    for rule in ("gated_delta_rule", "kda"):
        yield op(f"{rule}/qwen3.5", rule, qwen)
    for rule, of in (("kda", qwen), ("gla", SHAPE)):
        for where in ("inside", "outside"):
            build = functools.partial(of_logits, rule, of, where == "inside")
            yield f"{rule}/gates_{where}", build, of, V5E
    for name, which in (("trellis", "trellis"), ("lattice-dec", "lattice")):
        at = f"{name}/c64"
        yield op(f"{at}/xla", which, chunk_size=64, implementation="xla")
        yield op(f"{at}/d128", which, WIDE, chunk_size=64)
        for chip in ("v6e", "v5p"):
            yield op(f"{at}/{chip}", which, chip=chip, chunk_size=64)
        yield op(f"{at}/small", which, SMALL, chunk_size=64)
    for plain, chip in OTHER_CHIPS.items():
        yield op(f"{plain}/{chip}/small", plain, SMALL, chip)
    for kernel, time in itertools.product(ATTENTION, LENGTHS):
        of = Shape(1, time, 12, 64)
        yield f"{kernel}/d64/t{time}", functools.partial(attention, kernel, of), of, V5E


def table() -> dict[str, Case]:
    """All cases of this file by name."""
    found: dict[str, Case] = {}
    for name, build, of, chip in _named():
        for direction, backward in PASSES.items():
            units = of.batch * of.time * of.heads
            made = functools.partial(build, backward)
            found[f"{name}/{direction}"] = Case(made, units, chip=chip)
    return found
