"""A case: a program, the chip it is compiled for, and its unit of work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from memjax.aot.cycles.bundles import Shares


class Program(NamedTuple):
    """A function of jax with its arguments, of which nothing is computed.

    Attributes:
        function: of jax.
        arguments: with `.shape` and `.dtype`.
        donated: arguments whose memory the results may take.
        flops: of one call, for the matrix unit's least time; 0 where unknown.
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
    """A builder of a program, the units of work in one call, and the chip."""

    build: Callable[[], Program]
    units: float
    unit: str = "token and head"
    chip: str = "v5e"


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    """An array without values, of which nothing is computed."""
    return jax.ShapeDtypeStruct(sizes, dtype)
