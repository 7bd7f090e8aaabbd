"""The largest size that fits, with few programs compiled."""

from collections.abc import Callable
from typing import NamedTuple


class Probe(NamedTuple):
    """What compiling one size said.

    Attributes:
        fits: whether the program fits.
        needed: bytes of a device, if the compiler says so.
        available: bytes that it has.
    """

    fits: bool
    needed: int | None
    available: int


class Edge(NamedTuple):
    """Where programs stop to fit, in units; both sides were compiled.

    Attributes:
        fits: the largest that fits; 0 where none does.
        fails: the next one; None where `most` fits.
        probes: of all that were compiled.
    """

    fits: int
    fails: int | None
    probes: dict[int, Probe]


def largest(probe: Callable[[int], Probe], start: int, most: int) -> Edge:
    """The largest number of units in [1, most] that fits.

    Memory grows about evenly with the size: the next size is where a line through the
    two last ones meets what there is. The edge is known when a size fits and the next
    does not.

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
        # Doubled until one fails, or as far as the line goes.
        guess = max(2 * low, guess or 0)
    elif guess is None or len(probes) % 3 == 0:
        # Every third is in the middle, so that a bent line costs few programs.
        guess = (low + high) // 2
    return min(max(guess, low + 1), high - 1)


def _on_the_line(probes: dict[int, Probe]) -> int | None:
    """Where memory is full, by the two sizes whose need is known and nearest to it."""
    known = [(size, p.needed, p.available) for size, p in probes.items() if p.needed]
    if len(known) < 2:
        return None
    known.sort(key=lambda row: abs(row[1] - row[2]))
    (size, needed, available), (other, more, _) = known[:2]
    if needed == more:
        return None
    slope = (more - needed) / (other - size)
    return int(size + (available - needed) / slope)
