"""Search for the largest size that fits, with few compilations."""

from collections.abc import Callable
from typing import NamedTuple


class Probe(NamedTuple):
    """Result of compiling one size.

    Attributes:
        fits: whether the program fits.
        needed: bytes on a device; None if unknown.
        available: bytes of a device.
    """

    fits: bool
    needed: int | None
    available: int


class Edge(NamedTuple):
    """The largest size that fits, in units, and the next; both were compiled.

    Attributes:
        fits: the largest that fits; 0 if none does.
        fails: the next size; None if `most` fits.
        probes: of all compiled sizes.
    """

    fits: int
    fails: int | None
    probes: dict[int, Probe]


def largest(probe: Callable[[int], Probe], start: int, most: int) -> Edge:
    """The largest number of units in [1, most] that fits.

    Memory is about linear in the size: the next probe is where the line through the two
    nearest ones meets the available memory. The search ends when a size fits and the
    next does not.

    Args:
        probe: compiles a size.
        start: the first size, >= 1.
        most: the largest, >= start.
    """
    probes: dict[int, Probe] = {}
    low, high = 0, most + 1
    size = start
    while high - low > 1:
        probes[size] = probe(size)
        low, high = (size, high) if probes[size].fits else (low, size)
        size = _next(probes, low, high, most)
    return Edge(low, None if high > most else high, probes)


def _next(probes: dict[int, Probe], low: int, high: int, most: int) -> int:
    """A size between the two sides of the edge."""
    guess = _on_the_line(probes)
    if high > most:
        # Doubled until one fails, or the line's estimate if larger.
        guess = max(2 * low, guess or 0)
    elif guess is None or len(probes) % 3 == 0:
        # Every third bisects, in case memory is not linear.
        guess = (low + high) // 2
    return min(max(guess, low + 1), high - 1)


def _on_the_line(probes: dict[int, Probe]) -> int | None:
    """The size that fills the memory, by the line through the two nearest probes."""
    known = [(size, p.needed, p.available) for size, p in probes.items() if p.needed]
    if len(known) < 2:
        return None
    known.sort(key=lambda row: abs(row[1] - row[2]))
    (size, needed, available), (other, more, _) = known[:2]
    if needed == more:
        return None
    slope = (more - needed) / (other - size)
    return int(size + (available - needed) / slope)
