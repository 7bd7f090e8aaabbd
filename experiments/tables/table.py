"""Tables that no study declares yet; see `experiments.lab.results`."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiments.lab.results import (  # noqa: F401
    load,
    number,
    percent,
    spread,
    thousands,
    times,
)


class Table(NamedTuple):
    """Header, rows of texts, names of result files, and notes below."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sources: Sequence[str]
    notes: Sequence[str] = ()


class NotMeasured(Exception):
    """There is no result yet."""


# The tables of one module, by name.
Tables = Mapping[str, Callable[[], Table]]
