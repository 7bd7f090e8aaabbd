"""Groups of packs that go through a chunk's phases one behind the other.

The compiler's schedule follows the order of a program. Packs that go through all phases
in step leave the matrix unit idle in some, and the others idle in the rest; where a
group's products stand between another group's sums, both run at once.
"""

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

#: A computation that yields between its phases.
Phases = Generator[None, None, Any]


def staggered(
    function: Callable[..., Phases], arrays: PyTree, groups: int = 1, lag: int = 1
) -> PyTree:
    """The result of function(*arrays), computed for groups of the packs.

    Args:
        function: of arrays whose first axis is packs, as its results' are.
        arrays: of all packs, whose number is a multiple of `groups`.
        groups: number of groups.
        lag: phases by which each group is behind the one before it, at least 1.
    """
    if groups == 1:
        return _result(function(*arrays))
    found: dict[int, Any] = {}

    def begin(i):
        part = jax.tree.map(lambda x: jnp.split(x, groups)[i], arrays)
        found[i] = yield from function(*part)

    waiting = [begin(i) for i in range(groups)]
    phase = 0
    while len(found) < groups:
        for phases in waiting[: phase // lag + 1]:
            next(phases, None)
        phase += 1
    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(found.get, range(groups)))


def _result(phases: Phases) -> Any:
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value
