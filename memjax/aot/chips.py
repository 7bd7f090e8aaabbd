"""Peak performance of TPUs, by name."""

from typing import NamedTuple

from memjax.checks import short
from memjax.training.monitoring.device_peaks import GIB, PEAK_FLOPS


class Chip(NamedTuple):
    """Peak performance of one chip, by the maker's data sheet.

    Attributes:
        flops: per second, dense bfloat16 matrix products with float32 sums.
        bandwidth: of its memory, bytes per second.
        memory: bytes.
        clock: of a core, Hz. jax sees the two cores of a v5p as one device: a program
            is divided between them.
        links: bytes per second to all neighbours in the pod.
        smallest: its smallest topology in libtpu.
    """

    flops: float
    bandwidth: float
    memory: int
    clock: float
    links: float
    smallest: str

    @property
    def bytes_per_cycle(self) -> float:
        """Memory traffic during one bundle of a core."""
        return self.bandwidth / self.clock


CHIPS = {
    "v5e": Chip(PEAK_FLOPS["TPU v5e"], 0.819e12, 16 * GIB, 1.5e9, 200e9, "v5e:2x2"),
    "v5p": Chip(PEAK_FLOPS["TPU v5p"], 2.765e12, 95 * GIB, 1.75e9, 600e9, "v5p:2x2x1"),
    "v6e": Chip(PEAK_FLOPS["TPU v6e"], 1.64e12, 32 * GIB, 1.75e9, 448e9, "v6e:2x2"),
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name, "v5e:16x16".

    Raises:
        ValueError: the chip is not known.
    """
    name, _, grid = topology.partition(":")
    if name not in CHIPS or not grid:
        known = ", ".join(chip.smallest for chip in CHIPS.values())
        raise ValueError(
            f"topology must be a chip and its grid, such as {known} or v5e:16x16, "
            f"got {short(topology)}"
        )
    return CHIPS[name]
