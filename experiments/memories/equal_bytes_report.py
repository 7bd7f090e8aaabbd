"""Puts the rows of the comparison together: `summary.json` and both plots.

    python -m experiments.memories.equal_bytes_report

Rows are compared in pairs, on the same documents, with the wide window of the fewest
bytes that are not below theirs: a tuned row with a tuned one of its seed. Where both
keep less, with the larger of the two.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.lab.measure import binned_losses
from experiments.lab.results import RESULTS, figure, write_report
from experiments.memories.documents import KINDS
from experiments.memories.equal_bytes_rows import ROWS
from memjax import evaluation
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import drawing, short_count, source_of
from memjax.evaluation.statistics import loss_difference_by_document

Result = dict[str, Any]


def load_rows(folder: Path) -> list[Result]:
    """The results of a folder, in the order of `ROWS`.

    Raises:
        ValueError: if two were scored on other texts or in other bins, and cannot be
            compared.
    """
    found = [
        json.loads(file.read_text("utf-8"))
        for name in ROWS
        for file in sorted(folder.glob(f"{name}-seed[0-9]*.json"))
    ]
    for row in found[1:]:
        for field in ("texts_digest", "edges", "bins", "layers"):
            if row[field] != found[0][field]:
                raise ValueError(
                    f"{row['row']} and {found[0]['row']} cannot be compared: "
                    f"{field} must be {found[0][field]}, got {row[field]}"
                )
    return found


def summary(rows: Sequence[Result]) -> Result:
    """All columns of all rows, and what each row saves over the wide window."""
    by_name = {(row["row"], row["seed"]): row for row in rows}
    return {
        "edges": rows[0]["edges"],
        "bins": rows[0]["bins"],
        "documents": len(rows[0]["documents"]),
        "rows": [_columns(row, _equal_bytes(row, by_name)) for row in rows],
        "missing": [name for name in ROWS if not any(r["row"] == name for r in rows)],
    }


#: The windows that others are compared with, not tuned and tuned.
WIDE = ("wide", "wide-shared")
WIDE_TUNED = tuple(f"{name}-tuned" for name in WIDE)


def _equal_bytes(row: Result, rows: dict[tuple[str, int], Result]) -> Result | None:
    """The wide window that a row is compared with, unless it is one itself."""
    tuned = "" if row["training"] is None else "-tuned"
    windows = [
        rows[name + tuned, row["seed"]]
        for name in WIDE
        if (name + tuned, row["seed"]) in rows
    ]
    if not windows or row in windows:
        return None
    enough = [window for window in windows if window["bytes"] >= row["bytes"]]
    size = lambda window: window["bytes"]
    return min(enough, key=size) if enough else max(windows, key=size)


def _columns(row: Result, base: Result | None) -> Result:
    bins, count = tuple(row["bins"]), len(row["edges"]) - 1
    scored = binned_losses(row["documents"], bins)
    # Of the documents that have all positions: lines of others would bend.
    long = [d for d in row["documents"] if d["targets"][-1]]
    positions = binned_losses(long, (0, count))
    kept = ("row", "label", "seed", "bytes", "needles", "facts", "reading", "training")
    found = {name: row[name] for name in kept}
    found["perplexity"] = {
        kind: evaluation.perplexity(scored, kind=kind) for kind in KINDS
    }
    by_position = evaluation.loss_by_position(positions, range(count + 1))
    found["perplexity_by_position"] = np.exp(by_position).tolist()
    if base is not None:
        found["saved_over"] = base["label"]
        other = binned_losses(base["documents"], bins)
        found["saved"] = {
            kind: loss_difference_by_document(
                _only(other, kind), _only(scored, kind)
            )._asdict()
            for kind in KINDS
        }
    return found


def _only(losses: TokenLosses, kind: str) -> TokenLosses:
    """The documents of one kind."""
    rows = [i for i, found in enumerate(losses.kinds) if found == kind]
    names = tuple(losses.documents[i] for i in rows)
    return TokenLosses(losses.nll[rows], losses.mask[rows], (kind,) * len(rows), names)


@figure("memories/positions", source="memories/equal_bytes")
def plot_positions(result: Result, path: Path) -> None:
    """Loss by position, a line a row that was tuned, of the seeds that all have.

    Others are too far from these: they stand in the table.
    """
    rows = [row for row in result["rows"] if row["training"]] or result["rows"]
    # Seeds differ by as much as rows do: a mean of more seeds is no fair comparison.
    of_row: dict[str, set[int]] = {}
    for row in rows:
        of_row.setdefault(row["row"], set()).add(row["seed"])
    shared = set.intersection(*of_row.values())
    rows = [row for row in rows if row["seed"] in shared] or rows
    # What others are compared with, first.
    rows = sorted(rows, key=lambda row: row["row"] not in WIDE_TUNED)
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        losses = np.log(row["perplexity_by_position"]).tolist()
        curves.setdefault(row["label"], []).append(losses)
    plots.loss_by_position(
        {name: np.mean(values, axis=0).tolist() for name, values in curves.items()},
        result["edges"],
        path,
        title="Loss by position, of the long test documents",
        source=source_of(result),
    )


@figure("memories/needles", source="memories/equal_bytes")
def plot_needles(result: Result, path: Path) -> None:
    """A map for each row: length against depth, the share of right answers."""
    found: dict[str, list[Any]] = {}
    for row in result["rows"]:
        found.setdefault(row["label"], []).append(_map(row["needles"]))
    columns = 4
    lines = -(-len(found) // columns)
    lengths = list(result["rows"][0]["needles"])
    depths = list(result["rows"][0]["needles"][lengths[0]])
    with drawing(
        path,
        rows=lines,
        columns=columns,
        size=(12.5, 1.2 + 1.9 * lines),
        title="Single needle by length in tokens (across) and depth (down): "
        "yellow is right, dark is wrong, between them seeds differ",
        source=source_of(result),
        sharex=True,
        sharey=True,
    ) as drawn:
        for axes in drawn.grid.flat[len(found) :]:
            axes.set_axis_off()
        for axes, (label, maps) in zip(drawn.grid.flat, found.items(), strict=False):
            axes.imshow(np.mean(maps, axis=0), vmin=0, vmax=1, cmap="viridis")
            axes.set_title(label)
            axes.grid(visible=False)
            ticks = [short_count(int(length)) for length in lengths]
            axes.set_xticks(range(len(lengths)), ticks)
            axes.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths])
            axes.set_aspect("auto")


def _map(needles: dict[str, Any]) -> list[list[float]]:
    """Depths by lengths."""
    columns = [[cell["right"] for cell in found.values()] for found in needles.values()]
    return np.transpose(columns).tolist()


def write(folder: Path = RESULTS / "memories" / "equal_bytes") -> Result | None:
    """Writes the summary and the plots of a folder's rows, if there are any."""
    rows = load_rows(folder)
    if not rows:
        return None
    question = "which memory, and does it beat a window of equal bytes?"
    result = write_report(folder / "summary", question, {}, summary(rows))
    plot_positions(result, folder / "positions.png")
    plot_needles(result, folder / "needles.png")
    return result


if __name__ == "__main__":
    tyro.cli(write)
