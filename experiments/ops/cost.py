"""Operations and bytes of each op, and the time that a device's roofline allows.

Only matrix products count, on whole chunks, except in Lattice with chunks of one token.
A cost is of one direction: the forward pass alone, or the backward pass alone. Bytes
are of the tokens, of float32 gates and rates, of the memory before and after, and in
the backward pass of the gradients of all. Gradients have the sizes of their arguments.
"""

from collections.abc import Callable
from typing import NamedTuple

from memjax.aot.chips import CHIPS
from memjax.training.monitoring.device_peaks import PEAK_FLOPS
from memjax_kernels import LatticeVariant
from memjax_kernels._src.linear.chunks import CHANNEL_CHUNK_SIZE as GATED_SLOTS_CHUNK
from memjax_kernels._src.linear.chunks import CHANNEL_CHUNK_SIZE as GLA_CHUNK
from memjax_kernels._src.linear.chunks import CHUNK_SIZE as DELTA_RULE_CHUNK
from memjax_kernels._src.linear.chunks import CHUNK_SIZE as SSD_CHUNK


class Cost(NamedTuple):
    """What one call does.

    Attributes:
        flops: floating-point operations; a multiply-add is two.
        bytes: read from and written to memory when nothing is read twice.
    """

    flops: float
    bytes: float

    def __add__(self, other: "Cost") -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class Device(NamedTuple):
    """Peaks of one chip.

    Attributes:
        flops: per second, dense bfloat16 matrix products with float32 sums.
        bandwidth: of its memory, bytes a second.
    """

    flops: float
    bandwidth: float


DEVICES = {
    "H100": Device(PEAK_FLOPS["NVIDIA H100 80GB HBM3"], 3.35e12),
    "H200": Device(PEAK_FLOPS["NVIDIA H200"], 4.8e12),
    **{name: Device(chip.flops, chip.bandwidth) for name, chip in CHIPS.items()},
}


def roofline_seconds(cost: Cost, device: Device) -> float:
    """The least time in which the device could do it."""
    return max(cost.flops / device.flops, cost.bytes / device.bandwidth)


class Sizes(NamedTuple):
    """Sizes of a call; an op takes those that it has.

    Attributes:
        batch: B.
        time: T, whole chunks.
        heads: H.
        key_dim: K; D = K = V in TTT-linear.
        value_dim: V.
        slots: M.
        chunk_size: C, of the ops whose function depends on it.
        itemsize: bytes of an element of the tokens.
    """

    batch: int
    time: int
    heads: int
    key_dim: int
    value_dim: int
    slots: int = 0
    chunk_size: int = 64
    itemsize: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of all heads, B T H."""
        return self.batch * self.time * self.heads


def linear_attention(sizes: Sizes, backward: bool) -> Cost:
    """The chunk form with C = 64.

    Per token and head the forward pass makes 2 C (K + V) operations inside the chunk
    and 4 K V with the memory. The backward pass makes all but the reads, 2 C V + 2 K V,
    again, and twice the products.
    """
    k, v, c = sizes.key_dim, sizes.value_dim, SSD_CHUNK
    return _linear(
        sizes,
        backward,
        score_flops=2 * c * k,
        read_flops=2 * c * v + 2 * k * v,
        write_flops=2 * k * v,
        input_bytes=sizes.itemsize * (2 * k + v),
        state_elements=k * v,
    )


def ssd(sizes: Sizes, backward: bool) -> Cost:
    """Linear attention with a gate, and 2 C² for sums of gates, again backwards."""
    passes = 2 if backward else 1
    gates = sizes.tokens * passes
    sums = Cost(gates * 2 * SSD_CHUNK**2, gates * 4)
    return linear_attention(sizes, backward) + sums


def gla(sizes: Sizes, backward: bool) -> Cost:
    """The chunk form with C = 32.

    Per token and head the forward pass makes C K operations for scores, in halves of
    blocks, 2 C V for their sums and 4 K V with the memory. The backward pass makes all
    but the reads, 2 C V + 2 K V, again, and twice the products.
    """
    k, v, c = sizes.key_dim, sizes.value_dim, GLA_CHUNK
    return _linear(
        sizes,
        backward,
        score_flops=c * k,
        read_flops=2 * c * v + 2 * k * v,
        write_flops=2 * k * v,
        input_bytes=sizes.itemsize * (2 * k + v) + 4 * k,
        state_elements=k * v,
    )


def gated_slots(sizes: Sizes, backward: bool) -> Cost:
    """The chunk form with C = 32 and gates.

    Per token and head the comparison with the slots makes 2 C K + C M operations inside
    the chunk and 4 M K with the memory; the read makes C M + 2 C V, and 4 M V. The
    backward pass makes all but the reads, 2 C V + 2 M V, again, and twice the products.
    """
    k, v, m, c = sizes.key_dim, sizes.value_dim, sizes.slots, GATED_SLOTS_CHUNK
    return _linear(
        sizes,
        backward,
        score_flops=2 * c * k + 2 * c * m + 2 * m * k,
        read_flops=2 * c * v + 2 * m * v,
        write_flops=2 * m * (k + v),
        input_bytes=sizes.itemsize * (2 * k + v + m) + 4 * m,
        state_elements=m * (k + v),
    )


def _linear(
    sizes: Sizes,
    backward: bool,
    *,
    score_flops: int,
    read_flops: int,
    write_flops: int,
    input_bytes: int,
    state_elements: int,
) -> Cost:
    """A linear recurrence, from operations and bytes of a token and head.

    Args:
        sizes: of the call.
        backward: the backward pass alone.
        score_flops: whose results the backward pass makes again.
        read_flops: of the products that make y.
        write_flops: of the products that make the memory; they are made again.
        input_bytes: of all inputs of a token.
        state_elements: of the memory of a head.
    """
    again = score_flops + write_flops
    flops = 2 * (again + read_flops) + again if backward else again + read_flops
    moved = (2 if backward else 1) * input_bytes + sizes.itemsize * sizes.value_dim
    state_bytes = 4 * sizes.batch * sizes.heads * state_elements
    return Cost(sizes.tokens * flops, sizes.tokens * moved + 2 * state_bytes)


def delta_rule(sizes: Sizes, backward: bool) -> Cost:
    """The chunk form with C = 64.

    Per token and head the forward pass makes 6 K V (reads and writes of the memory) +
    6 C K + 4 C V (inside a chunk) + 2/3 C² (the inverse) operations. The backward pass
    makes all but the outputs again, twice the products, and 4 C² for the inverse.
    """
    k, v, c = sizes.key_dim, sizes.value_dim, DELTA_RULE_CHUNK
    output = 2 * k * v + 2 * c * v
    products = 6 * k * v + 6 * c * k + 4 * c * v
    flops = products + 2 / 3 * c**2
    if backward:
        flops += 2 * products - output + 4 * c**2
    # The memory after the call has no gradient here.
    inputs = sizes.itemsize * (2 * k + v) + 4
    moved = (2 if backward else 1) * inputs + sizes.itemsize * v
    memory = 2 * 4 * k * v * sizes.batch * sizes.heads
    return Cost(sizes.tokens * flops, sizes.tokens * moved + memory)


def gated_delta_rule(sizes: Sizes, backward: bool) -> Cost:
    """The delta rule with a gate, and 2 C² for sums of gates, again backwards."""
    gates = sizes.tokens * (2 if backward else 1)
    sums = Cost(gates * 2 * DELTA_RULE_CHUNK**2, gates * 4)
    return delta_rule(sizes, backward) + sums


def ttt_linear(sizes: Sizes, backward: bool) -> Cost:
    """The dual form on whole mini-batches of C tokens.

    Per token and head the forward pass makes 6 D² operations (the layer at k, at q,
    and its step) + 4 C D inside the mini-batch; the backward pass makes them again, and
    twice as many. Layer norms are left out: some 20 D.
    """
    width = sizes.value_dim
    flops = (6 * width**2 + 4 * sizes.chunk_size * width) * (3 if backward else 1)
    # The memory after the call has no gradient here.
    inputs = sizes.itemsize * 3 * width + 4
    moved = (2 if backward else 1) * inputs + sizes.itemsize * width
    memory = 2 * 4 * width * (width + 1) * sizes.batch * sizes.heads
    return Cost(sizes.tokens * flops, sizes.tokens * moved + memory)


def trellis(sizes: Sizes, backward: bool) -> Cost:
    """Both passes, with a gate for each.

    A pass over tokens of width D in chunks of C makes, per token and head, 6 M D +
    2 C (D + M) operations, and its backward pass from kept memories 16 M D + 6 C D +
    4 C M; reads that the second pass needs again add 2 C M. Bytes hold the memories
    kept at every chunk's start instead of those before and after.
    """
    m, c = sizes.slots, sizes.chunk_size
    k, v = sizes.key_dim, sizes.value_dim
    if backward:
        flops = sum(16 * m * d + 6 * c * d + 4 * c * m for d in (k, v)) + 2 * c * m
    else:
        flops = sum(6 * m * d + 2 * c * (d + m) for d in (k, v))
    inputs = 2 * k + v + m
    elements = (2 if backward else 1) * inputs + v + m * (k + v) / c
    gates = 4 * 4 * (2 if backward else 1)
    return Cost(
        sizes.tokens * flops, sizes.tokens * (sizes.itemsize * elements + gates)
    )


def lattice(sizes: Sizes, backward: bool, variant: LatticeVariant = "dec") -> Cost:
    """A normalised call without forgetting.

    In chunks: per token and head F = 2 M V P + 2 C (4 M + 2 V) operations, with P = 4
    products of M V for "dec", 3 for "enc" and "sim"; backward two for each of them, and
    all of them again but the read: 3 F - 2 M V - 2 C V. C = 1 counts elements:
    F = (2 P + 5) M V, backward 3 F - 2 M V. Bytes hold the memories kept at every
    chunk's start, which the forward pass writes where a gradient is taken.
    """
    m, v, c = sizes.slots, sizes.value_dim, sizes.chunk_size
    products = 4 if variant == "dec" else 3
    if c == 1:
        flops, read = (2 * products + 5) * m * v, 2 * m * v
    else:
        flops = 2 * products * m * v + 2 * c * (4 * m + 2 * v)
        read = 2 * m * v + 2 * c * v
    inputs, kept = 2 * m + v, m * v / c
    if backward:
        flops = 3 * flops - read
    passes = 2 if backward else 1
    moved = sizes.itemsize * (passes * inputs + v + kept) + passes * 4
    return Cost(sizes.tokens * flops, sizes.tokens * moved)


COSTS: dict[str, Callable[[Sizes, bool], Cost]] = {
    "linear_attention": linear_attention,
    "ssd": ssd,
    "gla": gla,
    "gated_slots": gated_slots,
    "delta_rule": delta_rule,
    "gated_delta_rule": gated_delta_rule,
    "ttt_linear": ttt_linear,
    "trellis": trellis,
    "lattice": lattice,
}
