"""What a case is: a program, the chip it is compiled for, and its unit of work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from experiments.ops.cost import DEVICES, Device
from experiments.ops.cycles.bundles import Shares

#: Clock in Hz of one core, by the name that a topology begins with. jax sees the two
#: cores of a v5p as one device: a program is divided between them.
CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
#: The smallest topology of each chip that libtpu describes.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


class Program(NamedTuple):
    """What is compiled.

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
    """A row of the table of cases.

    Attributes:
        build: makes the program; called in the process that compiles it.
        units: of work in one call, by which cycles are divided.
        unit: what that is, such as "token and head".
        chip: a name of `CLOCKS`.
    """

    build: Callable[[], Program]
    units: float
    unit: str = "token and head"
    chip: str = "v5e"

    @property
    def peaks(self) -> Device:
        """Operations and bytes a second of the chip."""
        return DEVICES[self.chip]


def least_bytes(program: Program) -> float:
    """Bytes that a program has to move: its arguments and results, each once."""
    if program.bytes is not None:
        return program.bytes
    results = jax.eval_shape(program.function, *program.arguments)
    return size_of((program.arguments, results))


def size_of(tree: PyTree) -> float:
    """Bytes of all arrays of a tree."""
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))
