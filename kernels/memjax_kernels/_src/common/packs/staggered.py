"""Groups of packs that go through a chunk's phases one behind the other.

The compiler's schedule follows the order of a program. Packs that go through all phases
in step leave the matrix unit idle in some, and the others idle in the rest; where a
group's products stand between another group's sums, both run at once.
"""

from collections.abc import Callable, Generator, Sequence
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
        return in_turn([function(*arrays)], lag)[0]

    def begin(i):
        part = jax.tree.map(lambda x: jnp.split(x, groups)[i], arrays)
        return function(*part)

    found = in_turn([begin(i) for i in range(groups)], lag)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *found)


def in_turn(computations: Sequence[Phases], lag: int) -> list[Any]:
    """The results of computations, each `lag` phases behind the one before it."""
    found: dict[int, Any] = {}

    def run(i):
        found[i] = yield from computations[i]

    waiting = [run(i) for i in range(len(computations))]
    phase = 0
    while len(found) < len(waiting):
        for phases in waiting[: phase // lag + 1]:
            next(phases, None)
        phase += 1
    return [found[i] for i in range(len(waiting))]
