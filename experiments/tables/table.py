"""What every table function uses: a result file by name, cells as text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.lab.results import RESULTS


class Table(NamedTuple):
    """A table before it is written as Markdown.

    Attributes:
        header: names of the columns; the first column names the rows.
        rows: one text a column.
        sources: names of the result files, as `load` takes them.
        notes: what else stands below, such as how a model was trained.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sources: Sequence[str]
    notes: Sequence[str] = ()


class NotMeasured(Exception):
    """There is no result yet, and the tables say so."""


# The tables of one module, by name.
Tables = Mapping[str, Callable[[], Table]]


def load(name: str) -> dict[str, Any]:
    """The result file `experiments/results/NAME.json`.

    Args:
        name: room and program, such as "hmt/length".

    Raises:
        FileNotFoundError: there is no such file.
    """
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def number(value: float | None, digits: int) -> str:
    """A number with thousands separated, or nothing where there is none."""
    return "" if value is None or value != value else f"{value:,.{digits}f}"


def spread(value: float | None, error: float | None, digits: int) -> str:
    """A number ± its standard error, which may be missing."""
    if value is None or error is None:
        return number(value, digits)
    return f"{value:,.{digits}f} ± {error:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, such as 1.9x."""
    return "" if value is None else f"{value:.3g}x"


def percent(share: float) -> str:
    """A share in percent."""
    return f"{share:.0%}"


def thousands(count: int) -> str:
    """A number of tokens."""
    return f"{count:,}"
