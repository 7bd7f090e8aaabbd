"""Result files, and the tables and plots that studies draw from them.

A study writes `experiments/results/NAME.json`, and declares in its own file of code the
tables and plots of that result, which `experiments.lab.render` writes:

    @table("hmt/cost")
    def cost(result):
        for name, row in result["models"].items():
            yield {"": name, "seconds": number(row["seconds"], 1)}
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as ScreenTable

from memjax.buckets.writing import write_atomically
from memjax.checks import short
from memjax.config_io import read_json
from memjax.evaluation.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"

#: Rows of a table: cells by column, or a text that becomes a note below the table.
Rows = Iterator[Mapping[str, str] | str]


def load(name: str) -> dict[str, Any]:
    """The result file `experiments/results/NAME.json`."""
    return read_object(RESULTS / f"{name}.json")


def read_object(file: Path, *fields: str) -> dict[str, Any]:
    """The object of a JSON file, which must have these fields."""
    found = read_json(file)
    if not isinstance(found, dict) or not {*fields} <= found.keys():
        raise ValueError(f"{file} must have the fields {fields}, got {short(found)}")
    return found


@contextlib.contextmanager
def rows_before(output: Path, config: Any, *but: str) -> Iterator[Any]:
    """Rows of `output`.json, or () unless its settings but these are `config`'s.

    Other processes wait here until the block, which adds to them, has ended.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    folder, rows = os.open(output.parent, os.O_RDONLY), ()
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if (file := Path(f"{output}.json")).is_file():
            before = read_object(file, "config", "rows")
            if settings(config, *but).items() <= before["config"].items():
                rows = before["rows"]
        yield rows
    finally:
        os.close(folder)


class Content(NamedTuple):
    """Columns of a table (the first names the rows), its cells, and notes below it."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that a study declares with `table`."""

    name: str
    sources: tuple[str, ...]
    rows: Callable[..., Rows]

    def content(self) -> Content:
        """The cells, from the result files."""
        return arranged(self.rows(*map(load, self.sources)), self.name)


def arranged(rows: Rows, name: str) -> Content:
    """The rows of a table by the columns of the first one."""
    found = list(rows)
    notes = [row for row in found if isinstance(row, str)]
    rows_of = [row for row in found if not isinstance(row, str)]
    header = list(rows_of[0])
    for row in rows_of:
        if unknown := row.keys() - rows_of[0].keys():
            raise ValueError(f"table {name}: no column {sorted(unknown)}")
    cells = [[row.get(column, "") for column in header] for row in rows_of]
    return Content(header, cells, list(dict.fromkeys(notes)))


def table(name: str, *sources: str) -> Callable[[Callable[..., Rows]], Table]:
    """Declares a table: the decorated function yields its rows.

    `name` is that of the marked block. The function takes the results `sources`, in
    this order; the one named as the table unless given.
    """
    return lambda rows: Table(name, sources or (name,), rows)


class Figure(NamedTuple):
    """A plot that a study declares with `figure`; it draws a result into a file."""

    name: str
    source: str
    draw: Callable[[dict[str, Any], Path], None]


def figure(name: str, source: str = "") -> Callable[[Callable[..., None]], Figure]:
    """Declares a plot: the decorated function draws the result `source` into a file.

    The result is that of the picture's name unless given.
    """
    return lambda draw: Figure(name, source or name, draw)


class Lookup:
    """Values of `{name[key]}` in a text, by a function of the key."""

    def __init__(self, find: Callable[[str], str]):
        self._find = find

    def __getitem__(self, key: str) -> str:
        return self._find(key)


def written(file: Path, columns: Sequence[str], named: Mapping[str, Any]) -> Rows:
    """Rows of words from a text file: a paragraph a row, cells with | between them.

    `{name[key]}` in a cell is that of `named`.
    """
    for text in file.read_text("utf-8").split("\n\n"):
        cells = " ".join(text.split()).format(**named).split("|")
        yield dict(zip(columns, map(str.strip, cells), strict=True))


def number(value: float | None, digits: int) -> str:
    """A number with thousands separated; empty for None and NaN."""
    return "" if value is None or value != value else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, such as 1.9x."""
    return "" if value is None else f"{value:.3g}x"


def settings(config: Any, *but: str) -> dict[str, Any]:
    """The fields of a config that change its result, as JSON; paths by their last part.

    `run_dir`, `output` and those named in `but` are left out.
    """
    fields, out = dataclasses.asdict(config), ("run_dir", "output", *but)
    kept = {k: v for k, v in fields.items() if k not in out}
    return json.loads(json.dumps(kept, default=lambda path: path.name))


def write_report(
    output: Path, question: str, settings: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes question, command, device, date, settings and results to `output`.json.

    Returns the report as its file reads back, from which plots are drawn.
    """
    report = provenance(question, settings) | dict(results)
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    write_atomically(Path(f"{output}.json"), text + "\n")
    return json.loads(text)


def show(title: str, rows: Rows) -> None:
    """Prints rows as a table; columns that do not fit the screen are below it."""
    (header, rows_of, notes), console = arranged(rows, title), Console(markup=False)
    columns = [*zip(header, *rows_of, strict=True)]
    # Words of a header may stand below each other.
    widths = [
        max(map(cell_len, ["", *head.split(), *cells])) for head, *cells in columns
    ]
    left, shown = [*range(1, len(columns))], False
    while left or not shown:
        chosen, room = [0], console.width - widths[0] - 4
        while left and (len(chosen) == 1 or widths[left[0]] + 3 <= room):
            room -= widths[left[0]] + 3
            chosen.append(left.pop(0))
        screen = ScreenTable(title=title)
        for i in chosen:
            screen.add_column(header[i], width=widths[i], overflow="fold")
        for row in rows_of:
            screen.add_row(*(row[i] for i in chosen))
        console.print(screen)
        title, shown = "", True
    console.print(*notes, sep="\n")
