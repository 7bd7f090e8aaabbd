"""A case: a program, the chip it is compiled for, and its unit of work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from experiments.lab.measure import tree_bytes
from memjax.aot.chips import CHIPS, Chip
from memjax.aot.cycles.bundles import Shares


class Program(NamedTuple):
    """A function of jax with its arguments.

    Attributes:
        function: of jax.
        arguments: with `.shape` and `.dtype`; nothing is computed.
        donated: arguments whose memory the results may take.
        flops: of one call, for the matrix unit's least time; 0 where no formula is
            known.
        bytes: that have to be moved at least; None is all arguments and results.
        shares: of the steps in which regions of a kernel run, by a part of its name.
    """

    function: Callable[..., Any]
    arguments: tuple[PyTree, ...]
    donated: tuple[int, ...] = ()
    flops: float = 0.0
    bytes: float | None = None
    shares: Mapping[str, Shares] = {}


class Case(NamedTuple):
    """A program with its chip and unit.

    Attributes:
        build: makes the program; called in the process that compiles it.
        units: of work in one call, by which cycles are divided.
        unit: what that is, such as "token and head".
        chip: a name of `CHIPS`.
    """

    build: Callable[[], Program]
    units: float
    unit: str = "token and head"
    chip: str = "v5e"

    @property
    def peaks(self) -> Chip:
        """Peaks of the chip."""
        return CHIPS[self.chip]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    """An array without values, of which nothing is computed."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def least_bytes(program: Program) -> float:
    """Bytes that a program has to move: its arguments and results, each once."""
    if program.bytes is not None:
        return program.bytes
    results = jax.eval_shape(program.function, *program.arguments)
    return float(tree_bytes((program.arguments, results)))
