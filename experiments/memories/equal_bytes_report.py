"""Results of the comparison at equal bytes: summary, tables, plots.

Rows are compared in pairs, on the same documents, with the wide window of the fewest
bytes that are not below theirs: a tuned row with a tuned one of its seed. If both wide
windows have fewer bytes, the larger of the two is the baseline.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.intervals import select_kind
from experiments.lab.measure import KINDS, binned_losses
from experiments.lab.results import (
    Rows,
    figure,
    number,
    percent,
    table,
    thousands,
    write_report,
)
from experiments.memories.equal_bytes_rows import ROWS
from memjax import evaluation
from memjax.evaluation.drawing import drawing, log_ticks, short_count, source_of
from memjax.evaluation.statistics import loss_difference_by_document

QUESTION = "which memory, and does it beat a window of equal bytes?"
#: The result file, without its folder, in which all rows are put together.
SUMMARY = "memories/equal_bytes"
#: Windows that other rows are compared with; tuned ones with "-tuned".
WIDE = ("wide", "wide-shared")
#: Rows of the plots: a ceiling, two baselines, and three kinds of memory.
DRAWN = (
    "full-tuned",
    "reread-tuned",
    "wide-shared-tuned",
    "gated-deltanet-shared",
    "hmt",
    "mplus",
)
#: Differences in nats that the plot leaves out.
OFF_SCALE = 1.0
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
    """All columns of all rows, and their loss difference from the wide window."""
    by_name = {(row["row"], row["seed"]): row for row in rows}
    return {
        "edges": rows[0]["edges"],
        "bins": rows[0]["bins"],
        "documents": len(rows[0]["documents"]),
        "rows": [_columns(row, _equal_bytes(row, by_name)) for row in rows],
        "missing": [name for name in ROWS if not any(r["row"] == name for r in rows)],
    }


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

    def size(window: Result) -> int:
        return window["bytes"]

    enough = [window for window in windows if size(window) >= row["bytes"]]
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
                select_kind(other, kind), select_kind(scored, kind)
            )._asdict()
            for kind in KINDS
        }
    return found


def write(folder: Path) -> Result | None:
    """Writes the summary and the plots of a folder's rows, if there are any."""
    rows = load_rows(folder)
    if not rows:
        return None
    result = write_report(folder, QUESTION, {}, summary(rows))
    plot_positions(result, folder.with_name("positions.png"))
    plot_needles(result, folder.with_name("needles.png"))
    return result


def _name(row: Mapping[str, Any]) -> str:
    return row["label"] + (f", seed {row['seed']}" if row["training"] else "")


def _difference(saved: Mapping[str, float] | None) -> str:
    """Nats a token with the 95% interval by document."""
    if saved is None:
        return ""
    low, high = (f"{saved[end]:+.3f}" for end in ("low", "high"))
    return f"{saved['nats']:+.3f} ({low} to {high})"


@table("memories/perplexity", SUMMARY)
def perplexity(result: Result) -> Rows:
    """State size and perplexity by kind of text."""
    for row in result["rows"]:
        yield {"": _name(row), "state size, bytes": thousands(row["bytes"])} | {
            f"PPL, {kind}": number(row["perplexity"][kind], 2) for kind in KINDS
        }
    for name in result["missing"]:
        yield {"": f"{name}: not run yet"}


@table("memories/saved", SUMMARY)
def saved(result: Result) -> Rows:
    """Loss difference from the window with the same state size."""
    for row in result["rows"]:
        if "saved" in row:
            yield (
                {"loss difference, nats/token": _name(row)}
                | {kind: _difference(row["saved"][kind]) for kind in KINDS}
                | {"state size, bytes": thousands(row["bytes"])}
                | {"baseline": row["saved_over"]}
            )


@table("memories/positions", SUMMARY)
def positions(result: Result) -> Rows:
    """Perplexity by position."""
    edges = result["edges"]
    for row in result["rows"]:
        yield {"PPL of tokens": _name(row)} | {
            f"{thousands(a)} to {thousands(b)}": number(x, 2)
            for a, b, x in zip(
                edges[:-1], edges[1:], row["perplexity_by_position"], strict=True
            )
        }


@table("memories/questions", SUMMARY)
def questions(result: Result) -> Rows:
    """Needles by length, and facts by distance."""

    def right(cells: Mapping[str, Any]) -> float:
        return sum(x["right"] for x in cells.values()) / len(cells)

    for row in result["rows"]:
        yield (
            {"right answers": _name(row)}
            | {
                f"needle in {int(length):,}": percent(right(cells))
                for length, cells in row["needles"].items()
            }
            | {
                f"fact {int(distance):,} tokens back": percent(cell["right"])
                for distance, cell in row["facts"].items()
            }
        )


@table("memories/cost", SUMMARY)
def cost(result: Result) -> Rows:
    """Cost of training and of reading on one core."""
    for row in result["rows"]:
        reading, training = row["reading"], row["training"] or {}
        updates, tokens = training.get("updates"), training.get("tokens")
        speed = reading["tokens"] / reading["cpu_seconds"]
        yield {
            "": _name(row),
            "tokens read in a CPU second": number(speed, 0),
            "updates": thousands(updates) if updates else "",
            "training tokens": thousands(tokens) if tokens else "",
            "learning rate": f"{training['rate']:g}" if training else "",
            "CPU seconds": number(training.get("cpu_seconds"), 0),
        }


def _drawn(result: Result, *others: str) -> dict[str, list[Result]]:
    """Rows of the plots by name, of the seeds that all of them have."""
    rows: dict[str, list[Result]] = {}
    for row in result["rows"]:
        rows.setdefault(row["row"], []).append(row)
    drawn = [name for name in DRAWN if name in rows] or [*rows][:6]
    found = {name: rows[name] for name in (*others, *drawn) if name in rows}
    # Seeds differ by as much as rows do: a mean of more seeds is no fair comparison.
    seeds = [{row["seed"] for row in some} for some in found.values()]
    shared = set.intersection(*seeds) if seeds else set()
    return {
        name: [row for row in some if row["seed"] in shared] or some
        for name, some in found.items()
    }


@figure("memories/positions", source=SUMMARY)
def plot_positions(result: Result, path: Path) -> None:
    """Loss difference from the tuned window by position."""
    rows = _drawn(result, "window-tuned")
    losses = {
        name: np.mean([np.log(row["perplexity_by_position"]) for row in some], axis=0)
        for name, some in rows.items()
    }
    edges = result["edges"]
    base = losses.pop("window-tuned", None)
    if base is None:
        base = np.zeros(len(edges) - 1)
    # A log axis has no 0: the first bin is drawn from half its end.
    bins = [max(edges[0], edges[1] / 2), *edges[1:]]
    title = "Loss difference from the window, by position (long test documents)"
    with drawing(path, size=(8.5, 5.0), title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        for i, (name, values) in enumerate(losses.items()):
            # Full attention beyond the positions of its pretraining is off the scale.
            shown = np.where(np.abs(base - values) < OFF_SCALE, base - values, np.nan)
            drawn.steps(axes, shown, bins, rows[name][0]["label"], i)
        log_ticks(axes, edges[1:])
        axes.axhline(0, color="0.3", linewidth=1)
        axes.set(xlabel="position in the text (tokens)")
        axes.set_ylabel("nats/token; above 0 is better")


@figure("memories/needles", source=SUMMARY)
def plot_needles(result: Result, path: Path) -> None:
    """Right answers by length and depth of the needle, a map for each row."""
    rows = _drawn(result)
    lines = -(-len(rows) // 3)
    first = next(iter(rows.values()))[0]["needles"]
    lengths, depths = list(first), list(next(iter(first.values())))
    with drawing(
        path,
        rows=lines,
        columns=3,
        size=(9.5, 1.4 + 2.0 * lines),
        title="Needle found (yellow) or not (dark), by length in tokens and depth",
        source=source_of(result),
        sharex=True,
        sharey=True,
    ) as drawn:
        for axes in drawn.grid.flat[len(rows) :]:
            axes.set_axis_off()
        for axes, some in zip(drawn.grid.flat, rows.values(), strict=False):
            maps = [
                [[row["needles"][n][d]["right"] for n in lengths] for d in depths]
                for row in some
            ]
            axes.imshow(np.mean(maps, axis=0), vmin=0, vmax=1, cmap="viridis")
            axes.set_title(some[0]["label"])
            axes.grid(visible=False)
            ticks = [short_count(int(length)) for length in lengths]
            axes.set_xticks(range(len(lengths)), ticks)
            axes.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths])
            axes.set_aspect("auto")
