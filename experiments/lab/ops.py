"""Inputs, calls, operations and bytes of every op, and the roofline of a device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

import memjax_kernels
from memjax.aot.chips import CHIPS
from memjax.training.monitoring.device_peaks import PEAK_FLOPS
from memjax_kernels import LatticeVariant
from memjax_kernels._src.linear.chunks import CHANNEL_CHUNK_SIZE, CHUNK_SIZE

#: The order in which an op takes its arrays.
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
#: Of all ops; one that an op lacks, or that does not run here, raises ValueError.
IMPLEMENTATIONS = ("reference", "xla", "pallas_tpu", "pallas_gpu")
#: Ops whose function depends on the chunk size.
CHUNKED = ("ttt_linear", "trellis", "lattice")


class Shape(NamedTuple):
    """Sizes of a call; slots are as many as channels."""

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
    names = ARGUMENTS[op]
    keys = jax.random.split(jax.random.key(0), 8)
    gate_width = (d,) if op in ("gla", "gated_slots") else ()

    def make(name: str, key: Array) -> Array:
        normal = functools.partial(jax.random.normal, key)
        match name:
            case "q" | "k":
                x = normal((b, t, h, d))
                return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)
            case "v":
                return normal((b, t, h, d)).astype(dtype)
            case "alpha":
                return jax.nn.softmax(normal((b, t, h, d))).astype(dtype)
            case "beta":
                return jax.nn.sigmoid(normal((b, t, h)))
            case "gamma" | "eta":
                return jax.nn.sigmoid(normal((b, t, h))) / 10
            case "g":
                return jax.nn.log_sigmoid(normal((b, t, h, *gate_width)) + 3)
            case _:
                return jnp.full((h, d), 1.0 if name == "ln_scale" else 0.0)

    return {name: make(name, key) for name, key in zip(names, keys, strict=False)}


def forward(
    op: str, implementation: str | None, chunk_size: int
) -> Callable[..., Array]:
    """The op as a function of its arrays, outputs only."""
    if op == "attention":
        cudnn: Any = "cudnn" if implementation == "cudnn" else "xla"
        return functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=cudnn
        )
    options: dict[str, Any] = {"implementation": implementation}
    if op in CHUNKED:
        options["chunk_size"] = chunk_size
    function = getattr(memjax_kernels, op)
    return lambda *arrays: function(*arrays, **options)[1]


def with_gradients(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Forward and backward, for a cotangent that no compiler can simplify."""

    def run(cotangent: Any, *arrays: Array) -> tuple[Any, ...]:
        y, vjp = jax.vjp(function, *arrays)
        return y, *vjp(cotangent)

    return run


class Cost(NamedTuple):
    """Operations and bytes of a call.

    Attributes:
        flops: of matrix products; a multiply-add is two.
        bytes: read from and written to memory if nothing is read twice.
    """

    flops: float
    bytes: float


class Device(NamedTuple):
    """Peaks of one chip: bfloat16 matrix products, and bytes of memory, a second."""

    flops: float
    bandwidth: float

    def least_seconds(self, cost: Cost) -> float:
        """The roofline: the least time in which the device could do it."""
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth)


DEVICES = {
    "H100": Device(PEAK_FLOPS["NVIDIA H100 80GB HBM3"], 3.35e12),
    "H200": Device(PEAK_FLOPS["NVIDIA H200"], 4.8e12),
    **{name: Device(chip.flops, chip.bandwidth) for name, chip in CHIPS.items()},
}


class Sizes(NamedTuple):
    """K, V, M slots, C chunk, and bytes of an element of the tokens."""

    key_dim: int
    value_dim: int
    slots: int = 0
    chunk_size: int = 64
    itemsize: int = 2


class Work(NamedTuple):
    """Of a token and head.

    Attributes:
        forward: operations of the forward pass.
        backward: of the backward pass alone.
        inputs: bytes of all inputs, whose gradients are as large.
        kept: elements of memories kept for the backward pass.
        state: float32 elements of a head's memory, moved twice a call.
    """

    forward: float
    backward: float
    inputs: float
    kept: float = 0.0
    state: int = 0


def work(op: str, sizes: Sizes, variant: LatticeVariant = "dec") -> Work:
    """Operations and bytes of the chunk forms, on whole chunks.

    Backward passes make products again, but not reads, and two more for each. The
    memory after the call has no gradient. Left out: norms and elementwise operations,
    except in Lattice with chunks of one token, where they are most of the work.
    """
    k, v, m, c, item = sizes
    match op:
        case "linear_attention":
            again, read = 2 * CHUNK_SIZE * k + 2 * k * v, 2 * v * (CHUNK_SIZE + k)
            gates, state = 0, k * v
        case "gla":
            # Scores in halves of blocks.
            c = CHANNEL_CHUNK_SIZE
            again, read = c * k + 2 * k * v, 2 * c * v + 2 * k * v
            gates, state = 4 * k, k * v
        case "gated_slots":
            # Comparison with the slots, then their read.
            c = CHANNEL_CHUNK_SIZE
            again = 2 * c * (k + m) + 2 * m * k + 2 * m * (k + v)
            read, state = 2 * v * (c + m), m * (k + v)
            gates = item * m + 4 * m
        case "ssd" | "gated_delta_rule":
            # Sums of gates, backwards twice.
            plain = "linear_attention" if op == "ssd" else "delta_rule"
            found, sums = work(plain, sizes), 2 * CHUNK_SIZE**2
            return found._replace(
                forward=found.forward + sums,
                backward=found.backward + 2 * sums,
                inputs=found.inputs + 4,
            )
        case "delta_rule":
            # Reads and writes of the memory, inside a chunk, and the inverse.
            c = CHUNK_SIZE
            products = 6 * k * v + 6 * c * k + 4 * c * v
            total = products + 2 / 3 * c**2
            back = total + 2 * products - 2 * k * v - 2 * c * v + 4 * c**2
            return Work(total, back, item * (2 * k + v) + 4, state=k * v)
        case "ttt_linear":
            # The layer at k and q, and its step; then inside the mini-batch.
            total = 6 * v**2 + 4 * c * v
            return Work(total, 3 * total, item * 3 * v + 4, state=v * (v + 1))
        case "trellis":
            # Two passes over tokens of width K and V.
            total = sum(6 * m * d + 2 * c * (d + m) for d in (k, v))
            back = sum(16 * m * d + 6 * c * d + 4 * c * m for d in (k, v)) + 2 * c * m
            return Work(total, back, item * (2 * k + v + m) + 16, m * (k + v) / c)
        case "lattice":
            products, read = (4 if variant == "dec" else 3), 2 * m * v + 2 * c * v
            total = 2 * products * m * v + 2 * c * (4 * m + 2 * v)
            if c == 1:
                total, read = (2 * products + 5) * m * v, 2 * m * v
            return Work(total, 3 * total - read, item * (2 * m + v) + 4, m * v / c)
        case _:
            raise ValueError(f"op must be one of {tuple(ARGUMENTS)}, got {op!r}")
    inputs = item * (2 * k + v) + gates
    return Work(again + read, 3 * again + 2 * read, inputs, state=state)


def cost_of_pass(
    op: str,
    tokens: int,
    heads: int,
    sizes: Sizes,
    backward: bool,
    variant: LatticeVariant = "dec",
) -> Cost:
    """Of one direction alone.

    Args:
        op: its name.
        tokens: B T H of the call.
        heads: B H, its memories.
        sizes: of a head.
        backward: the backward pass, not the forward.
        variant: of Lattice.
    """
    found = work(op, sizes, variant)
    passes, flops = (2, found.backward) if backward else (1, found.forward)
    moved = passes * found.inputs + sizes.itemsize * (sizes.value_dim + found.kept)
    return Cost(tokens * flops, tokens * moved + 8 * heads * found.state)


def cost(
    op: str,
    shape: Shape,
    chunk_size: int,
    dtype: str,
    backward: bool,
    variant: LatticeVariant = "dec",
) -> Cost:
    """Operations and bytes of one call, forward or both directions."""
    b, t, h, d = shape
    itemsize = jnp.dtype(dtype).itemsize
    if op == "attention":
        # The triangle of scores, twice; backward recomputes it and does four more.
        flops = 2.0 * b * h * t * t * d * (3.5 if backward else 1)
        return Cost(flops, 4.0 * b * t * h * d * itemsize * (3 if backward else 1))
    given = (op, b * t * h, b * h, Sizes(d, d, d, chunk_size, itemsize))
    passes = (False, True) if backward else (False,)
    found = [cost_of_pass(*given, direction, variant) for direction in passes]
    return Cost(sum(x.flops for x in found), sum(x.bytes for x in found))
