"""Result files: where they lie, how they are written, and tables on a screen.

A result lies in `experiments/results/<room>/<program>.json`, a plot beside it as .png.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memjax.evaluation.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"


def settings(config: Any) -> dict[str, Any]:
    """The fields of a program's config that change its result, as JSON has them.

    Args:
        config: a dataclass. Its fields `run_dir` and `output` are left out. Of paths
            the last part is kept: where a file lies says nothing on another machine.
    """
    fields = dataclasses.asdict(config)
    kept = {k: v for k, v in fields.items() if k not in ("run_dir", "output")}
    return json.loads(json.dumps(kept, default=lambda path: path.name))


def write_report(
    output: Path,
    question: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes `output`.json: question, command, device, date, settings and results.

    Args:
        output: the file's path without its ending; folders are made.
        question: that the results answer.
        settings: as `settings` gives them.
        results: added to the report's top level; values must be JSON's.

    Returns:
        The report as its file reads back, from which plots are drawn.
    """
    report = provenance(question, settings) | dict(results)
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    Path(f"{output}.json").write_text(text + "\n")
    return json.loads(text)


def show(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> None:
    """Prints a table with one row a name; floats with three decimals, text as it is."""
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")

    def text(cell: Any) -> str:
        if isinstance(cell, str):
            return cell
        return f"{cell:.3f}" if isinstance(cell, float) else f"{cell:,}"

    for name, cells in rows.items():
        table.add_row(name, *(text(cell) for cell in cells))
    Console().print(table)
