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
from memjax_kernels._src.linear.chunks import CHUNK_SIZE, channel_chunk_size

#: The order in which an op takes its arrays.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear_attention": ("q", "k", "v"),
    "ssd": ("q", "k", "v", "g"),
    "gla": ("q", "k", "v", "g"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "beta", "g"),
    "kda": ("q", "k", "v", "beta", "g"),
    "gdn2": ("q", "k", "v", "erase", "write", "g"),
    "gated_slots": ("q", "k", "v", "alpha", "g"),
    "ttt_linear": ("q", "k", "v", "eta", "ln_scale", "ln_bias"),
    "trellis": ("q", "k", "v", "alpha", "gamma", "g"),
    "lattice": ("q", "k", "v", "gamma"),
    "attention": ("q", "k", "v"),
}
#: Of all ops; one that an op lacks, or that does not run here, raises ValueError.
IMPLEMENTATIONS = ("reference", "xla", "pallas_tpu", "pallas_gpu", "jla")
#: Ops whose function depends on the chunk size.
CHUNKED = ("ttt_linear", "trellis", "lattice")


class Shape(NamedTuple):
    """Sizes of a call; `width` is K, V and slots, and 0 key heads are `heads`."""

    batch: int
    time: int
    heads: int
    width: int
    key_heads: int = 0


def inputs(op: str, shape: Shape, dtype: str) -> dict[str, Array]:
    """Random arrays as a trained layer would give them, by name, in order.

    Keys and queries have unit norm, gates keep 95% of the memory at the median. Gates
    are float32, as in the layers.
    """
    b, t, h, d, key_heads = shape
    names = ARGUMENTS[op]
    keys = jax.random.split(jax.random.key(0), 8)
    gate_width = (d,) if op in ("gla", "kda", "gdn2", "gated_slots") else ()

    def make(name: str, key: Array) -> Array:
        normal = functools.partial(jax.random.normal, key)
        match name:
            case "q" | "k":
                x = normal((b, t, key_heads or h, d))
                return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)
            case "v":
                return normal((b, t, h, d)).astype(dtype)
            case "alpha":
                return jax.nn.softmax(normal((b, t, h, d))).astype(dtype)
            case "beta":
                return jax.nn.sigmoid(normal((b, t, h)))
            case "erase" | "write":
                return jax.nn.sigmoid(normal((b, t, h, d)))
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
    """Matrix products' operations, a multiply-add being two, and bytes moved once."""

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


class Work(NamedTuple):
    """Of a token and head.

    Attributes:
        forward: operations of the forward pass.
        backward: of the backward pass alone.
        inputs: bytes of all inputs, whose gradients are as large.
        residuals: elements of memories stored for the backward pass.
        state: float32 elements of a head's memory, moved twice a call.
    """

    forward: float
    backward: float
    inputs: float
    residuals: float = 0.0
    state: int = 0


def work(op: str, d: int, chunk_size: int, itemsize: int) -> Work:
    """Operations and bytes of the chunk forms, on whole chunks of heads of width d.

    Backward passes make products again, but not reads, and two more for each. The
    memory after the call has no gradient. Left out: norms and elementwise operations,
    except in Lattice with chunks of one token, where they are most of the work.
    """
    c, tokens = chunk_size, itemsize * 3 * d
    match op:
        case "linear_attention":
            again = read = 2 * CHUNK_SIZE * d + 2 * d**2
            gates, state = 0, d**2
        case "gla":
            # Scores in halves of blocks.
            c = channel_chunk_size()
            again, read = c * d + 2 * d**2, 2 * c * d + 2 * d**2
            gates, state = 4 * d, d**2
        case "gated_slots":
            # Comparison with the slots, then their read.
            c = channel_chunk_size()
            again, read = 4 * c * d + 6 * d**2, 2 * d * (c + d)
            gates, state = itemsize * d + 4 * d, 2 * d**2
        case "ssd" | "gated_delta_rule":
            # Sums of gates, backwards twice.
            plain = "linear_attention" if op == "ssd" else "delta_rule"
            found, sums = work(plain, d, c, itemsize), 2 * CHUNK_SIZE**2
            return found._replace(
                forward=found.forward + sums,
                backward=found.backward + 2 * sums,
                inputs=found.inputs + 4,
            )
        case "delta_rule" | "kda" | "gdn2":
            # Reads and writes of the memory, inside a chunk, and the inverse.
            c = CHUNK_SIZE if op == "delta_rule" else channel_chunk_size()
            products = 6 * d**2 + 10 * c * d
            total = products + 2 / 3 * c**2
            back = total + 2 * products - 2 * d**2 - 2 * c * d + 4 * c**2
            found = Work(total, back, tokens + 4, state=d**2)
            if op == "delta_rule":
                return found
            # Scores in halves of blocks, so that half of two products is left out.
            return found._replace(
                forward=found.forward - 2 * c * d,
                backward=found.backward - 6 * c * d,
                inputs=found.inputs + (4 * d if op == "kda" else 12 * d - 4),
            )
        case "ttt_linear":
            # The layer at k and q, and its step; then inside the mini-batch.
            total = 6 * d**2 + 4 * c * d
            return Work(total, 3 * total, tokens + 4, state=d * (d + 1))
        case "trellis":
            # Two passes over tokens.
            total = 2 * (6 * d**2 + 4 * c * d)
            back = 2 * (16 * d**2 + 10 * c * d) + 2 * c * d
            return Work(total, back, tokens + itemsize * d + 16, 2 * d**2 / c)
        case "lattice":
            total, read = 8 * d**2 + 12 * c * d, 2 * d**2 + 2 * c * d
            if c == 1:
                total, read = 13 * d**2, 2 * d**2
            return Work(total, 3 * total - read, tokens + 4, d**2 / c)
        case _:
            raise ValueError(f"op must be one of {tuple(ARGUMENTS)}, got {op!r}")
    return Work(again + read, 3 * again + 2 * read, tokens + gates, state=state)


def cost(op: str, shape: Shape, chunk_size: int, dtype: str, backward: bool) -> Cost:
    """Operations and bytes of one call, forward or both directions."""
    b, t, h, d, key_heads = shape
    itemsize, tokens = jnp.dtype(dtype).itemsize, b * t * h
    if op == "attention":
        # The triangle of scores, twice; backward recomputes it and does four more.
        flops = 2.0 * tokens * t * d * (3.5 if backward else 1)
        return Cost(flops, 4.0 * tokens * d * itemsize * (3 if backward else 1))
    found = work(op, d, chunk_size, itemsize)
    shared = 2 * itemsize * d * (1 - key_heads / h) if key_heads else 0
    found = found._replace(inputs=found.inputs - shared)
    outputs = itemsize * (d + found.residuals)
    flops, moved = found.forward, found.inputs + outputs
    passes = 2 if backward else 1
    if backward:
        flops, moved = flops + found.backward, moved + 2 * found.inputs + outputs
    return Cost(tokens * flops, tokens * moved + passes * 8 * b * h * found.state)
