"""Sums of log gates in two parts, exact for mild gates next to strong ones."""

from typing import NamedTuple

from jaxtyping import Array, Float

# exp of this is 0 in float32. Gates no lower keep the differences of their sums finite.
FORGETS_ALL = -104.0
# Gates are summed in two parts: multiples of 1 / STEPS, whose sums float32 holds whole
# in chunks of up to 2,500 tokens, and the rest. Sums in one part would lose four digits
# of a mild gate after some strong ones.
STEPS = 64.0


class Sums(NamedTuple):
    """Sums of gates in two parts, [..., C]."""

    coarse: Float[Array, "*B C"]
    fine: Float[Array, "*B C"]
