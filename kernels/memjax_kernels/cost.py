"""Operations and bytes of an op, and the time that a device's roofline allows."""

from typing import NamedTuple


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
    "H100": Device(989e12, 3.35e12),
    "H200": Device(989e12, 4.8e12),
    "v5e": Device(197e12, 0.819e12),
    "v5p": Device(459e12, 2.765e12),
    "v6e": Device(918e12, 1.64e12),
}


def roofline_seconds(cost: Cost, device: Device) -> float:
    """The least time in which the device could do it."""
    return max(cost.flops / device.flops, cost.bytes / device.bandwidth)
