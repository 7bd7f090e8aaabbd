"""Inputs, call and cost of every op, for the benchmark and the GPU check."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

import memjax_kernels
from experiments.ops.cost import COSTS, Cost, Sizes

# The order in which an op takes its arrays.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear_attention": ("q", "k", "v"),
    "ssd": ("q", "k", "v", "g"),
    "gla": ("q", "k", "v", "g"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "beta", "g"),
    "gated_slots": ("q", "k", "v", "alpha", "g"),
    "ttt_linear": ("q", "k", "v", "eta", "ln_scale", "ln_bias"),
    "trellis": ("q", "k", "v", "alpha", "gamma", "g"),
    "lattice": ("q", "k", "v", "gamma"),
    "attention": ("q", "k", "v"),
}
STALE = ("ttt_linear", "trellis", "lattice")


class Shape(NamedTuple):
    """Sizes of one case; slots are as many as channels."""

    batch: int
    time: int
    heads: int
    width: int


def inputs(op: str, shape: Shape, dtype: str) -> dict[str, Array]:
    """Random arrays as a trained layer would give them, by name, in order.

    Keys and queries have unit norm, gates keep 95% of the memory at the median. Gates
    are float32, as in the layers.
    """
    b, t, h, d = shape
    keys = dict(
        zip(ARGUMENTS[op], jax.random.split(jax.random.key(0), 8), strict=False)
    )
    normal = lambda name, *more: jax.random.normal(keys[name], (b, t, h, *more))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    make: dict[str, Callable[[], Array]] = {
        "q": lambda: unit(normal("q", d)).astype(dtype),
        "k": lambda: unit(normal("k", d)).astype(dtype),
        "v": lambda: normal("v", d).astype(dtype),
        "alpha": lambda: jax.nn.softmax(normal("alpha", d)).astype(dtype),
        "beta": lambda: jax.nn.sigmoid(normal("beta")),
        "gamma": lambda: jax.nn.sigmoid(normal("gamma")) / 10,
        "eta": lambda: jax.nn.sigmoid(normal("eta")) / 10,
        "g": lambda: jax.nn.log_sigmoid(
            normal("g", *([d] if op in ("gla", "gated_slots") else [])) + 3
        ),
        "ln_scale": lambda: jnp.ones((h, d)),
        "ln_bias": lambda: jnp.zeros((h, d)),
    }
    return {name: make[name]() for name in ARGUMENTS[op]}


def forward(
    op: str, implementation: str | None, chunk_size: int
) -> Callable[..., Array]:
    """The op as a function of its arrays, outputs only."""
    if op == "attention":
        return functools.partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            implementation="cudnn" if implementation == "cudnn" else "xla",
        )
    function = getattr(memjax_kernels, op)
    options: dict[str, Any] = {"implementation": implementation}
    if op in STALE:
        options["chunk_size"] = chunk_size
    return lambda *arrays: function(*arrays, **options)[1]


def written(op: str) -> tuple[str, ...]:
    """Every implementation that the op has, whether it runs here or not."""
    module = sys.modules[getattr(memjax_kernels, op).__module__]
    return get_args(module.Implementation)


def both(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Forward and backward, for a cotangent that no compiler can simplify."""

    def run(cotangent: Any, *arrays: Array) -> tuple[Any, ...]:
        y, pull = jax.vjp(function, *arrays)
        return y, *pull(cotangent)

    return run


def cost(op: str, shape: Shape, chunk_size: int, dtype: str, backward: bool) -> Cost:
    """Operations and bytes of one call, forward or both directions."""
    b, t, h, d = shape
    itemsize = jnp.dtype(dtype).itemsize
    if op == "attention":
        # The triangle of scores, twice; backward recomputes it and does four more.
        flops = 2.0 * b * h * t * t * d * (3.5 if backward else 1)
        return Cost(flops, 4.0 * b * t * h * d * itemsize * (3 if backward else 1))
    sizes = Sizes(b, t, h, d, d, d, chunk_size, itemsize)
    forward = COSTS[op](sizes, False)
    return forward + COSTS[op](sizes, True) if backward else forward
