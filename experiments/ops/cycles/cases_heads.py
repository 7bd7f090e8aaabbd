"""Cases of what stands around memories and attention: norms, convolutions, layouts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.ops import cases
from experiments.ops.cycles.case import Case, Program
from experiments.ops.cycles.cases_ops import PASSES, SHAPE
from memjax_kernels._src import heads, recurrent_block

B, T, H, K = SHAPE
#: The tokens as a projection leaves them, and their layout where heads come first.
FLAT = jax.ShapeDtypeStruct((B, T, H * K), jnp.bfloat16)
FIRST = jax.ShapeDtypeStruct((B, H, T, K), jnp.bfloat16)
Call = Callable[..., Array]


def numbers(*shape: int) -> Any:
    """Parameters or angles."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of_heads(x: Array) -> Array:
    """[B, T, H K] -> [B, T, H, K]."""
    return x.reshape(SHAPE)


#: Calls by name, with their arguments; `options` choose the implementation.
CALLS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "short_convolution": (
        lambda x, filters, before, **options: recurrent_block.short_convolution(
            of_heads(x), filters, before, **options
        ),
        (FLAT, numbers(4, H, K), numbers(B, 3, H, K)),
    ),
    "gated_norm": (
        lambda y, gate, scale, **options: recurrent_block.gated_norm(
            of_heads(y), of_heads(gate), scale, 1e-5, **options
        ),
        (FLAT, FLAT, numbers(K)),
    ),
    "l2_normalize": (
        lambda x, **options: recurrent_block.l2_normalize(of_heads(x), **options),
        (FLAT,),
    ),
    "rotate": (
        lambda x, cos, sin, **options: heads.rotate(of_heads(x), cos, sin, **options),
        (FLAT, numbers(T, K // 2), numbers(T, K // 2)),
    ),
}


def program(name: str, backward: bool, **options: Any) -> Program:
    """A call on tokens [B, T, H K], or with its gradients."""
    call, given = CALLS[name]

    def forward(*arrays: Array) -> Array:
        return call(*arrays, **options).reshape(FLAT.shape)

    if backward:
        return Program(cases.both(forward), (FLAT, *given))
    return Program(forward, given)


def layout(first: bool) -> Program:
    """Heads before tokens, or back; the empty half of the lanes is moved as well."""
    moved = 3 * B * T * H * K * 2.0
    if first:
        return Program(lambda x: heads.heads_first(of_heads(x)), (FLAT,), bytes=moved)
    back = lambda x: heads.heads_last(x).reshape(FLAT.shape)
    return Program(back, (FIRST,), bytes=moved)


def table() -> dict[str, Case]:
    """All cases of this file by name."""
    found: dict[str, Case] = {}
    for name in CALLS:
        for direction, backward in PASSES.items():
            for form, options in (("", {}), ("/xla", {"implementation": "xla"})):
                build = functools.partial(program, name, backward, **options)
                found[f"{name}{form}/{direction}"] = Case(build, B * T * H)
    for name, first in (("heads_first", True), ("heads_last", False)):
        found[f"{name}/forward"] = Case(functools.partial(layout, first), B * T * H)
    return found
