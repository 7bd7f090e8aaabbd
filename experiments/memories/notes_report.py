"""Scores of the notes study beside those of text itself, and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.lab.results import figure
from experiments.memories import notes_task as notes
from experiments.memories import small_models
from memjax.evaluation.drawing import drawing, log_ticks, source_of
from memjax.evaluation.statistics import interval, paired, standard_error
from memjax.models import ModelConfig

TEXT, COMPRESSED = "text, read again", "compressed text, read again"
#: A reader who has lost a note guesses its number.
GUESS = 1 / notes.NUMBERS

# Share of right answers [distances, R] by the notes of a text.
Shares = dict[int, np.ndarray]


class Answered(NamedTuple):
    """A model and what it answered; the first is a baseline, and no memory.

    Attributes:
        name: of the mechanism.
        model: what was trained.
        runs: one a seed: its `seconds`, and its `answers` [distances, R, N] by the
            notes of a text.
    """

    name: str
    model: ModelConfig
    runs: Sequence[Mapping[str, Any]]


def report(
    found: Sequence[Answered],
    tests: Mapping[int, notes.Test],
    distances: Sequence[int],
) -> dict[str, Any]:
    """Scores of all, differences of each memory from the best baseline, a sample."""
    window, *memories = found
    # The largest of the states, in favour of the text.
    budget = max(small_models.state_bytes(x.model) for x in found)
    shares = {x.name: _shares(x, tests) for x in found}
    baselines = {window.name: shares[window.name]} | {
        name: {
            count: np.stack([_kept(kept(test, d, budget)) for d in distances])
            for count, test in tests.items()
        }
        for name, kept in (
            (TEXT, notes.kept_as_text),
            (COMPRESSED, notes.kept_as_compressed_text),
        )
    }
    rows: dict[str, dict[str, Any]] = {x.name: _sizes(x) for x in found}
    rows |= {name: {"state_bytes": budget} for name in (TEXT, COMPRESSED)}
    for x in found:
        rows[x.name]["seeds"] = _by_seed(x, tests)
    for name, row in rows.items():
        own = baselines.get(name) or shares[name]
        row["right"] = {str(n): _means(values) for n, values in own.items()}
    return {
        "models": rows,
        "ahead": {
            x.name: {
                str(n): _ahead(
                    shares[x.name][n], {k: v[n] for k, v in baselines.items()}
                )
                for n in tests
            }
            for x in memories
        },
        "sample": _sample(found, tests, distances),
    }


def _shares(found: Answered, tests: Mapping[int, notes.Test]) -> Shares:
    """Mean over seeds and notes; texts stay apart."""
    return {n: right.mean(axis=(0, 3)) for n, right in _right(found, tests)}


def _by_seed(
    found: Answered, tests: Mapping[int, notes.Test]
) -> dict[str, list[list[float]]]:
    """One list a seed, of a mean a distance."""
    return {
        str(n): right.mean(axis=(2, 3)).tolist() for n, right in _right(found, tests)
    }


def _right(found: Answered, tests: Mapping[int, notes.Test]):
    """By the notes of a text: right or not, [seeds, distances, R, N]."""
    for count, test in tests.items():
        right = np.asarray(test.notes.numbers) - notes.BYTES - notes.NAMES
        answers = np.asarray([run["answers"][str(count)] for run in found.runs])
        yield count, answers == right


def _kept(kept: np.ndarray) -> np.ndarray:
    return np.where(kept, 1.0, GUESS).mean(axis=1)


def _sizes(found: Answered) -> dict[str, Any]:
    return {
        "state_bytes": small_models.state_bytes(found.model),
        "parameters": small_models.parameters(found.model),
        "seconds": [run["seconds"] for run in found.runs],
    }


def _means(shares: np.ndarray) -> list[dict[str, float]]:
    """One a distance, with its interval over texts."""
    return [interval(values)._asdict() for values in shares]


def _ahead(memory: np.ndarray, baselines: Mapping[str, np.ndarray]) -> list[dict]:
    """One a distance: what the memory answers more than the best baseline there."""
    rows = []
    for i, own in enumerate(memory):
        best = max(baselines, key=lambda name: baselines[name][i].mean())
        other = baselines[best][i]
        found = paired(own, other)._asdict() | {"error": standard_error(own - other)}
        rows.append({"baseline": best} | found)
    return rows


def _sample(
    found: Sequence[Answered], tests: Mapping[int, notes.Test], distances: Sequence[int]
) -> str:
    """The first text with fewest notes, and what was answered at the last distance."""
    count = min(tests)
    test = tests[count]
    tokens = np.asarray(test.first[0]).tolist()
    drawn = {k: np.asarray(v[0]) for k, v in test.notes._asdict().items()}
    order = np.argsort(drawn["asked"])
    right = drawn["numbers"] - notes.BYTES - notes.NAMES
    lines = [f"{_written(tokens)} ... {distances[-1]:,} bytes of text later:"]
    for name, _, runs in found:
        given = np.asarray(runs[0]["answers"][str(count)])[-1, 0]
        cells = [
            f"{_token(int(drawn['names'][i]))}: {given[i]} "
            + ("(right)" if given[i] == right[i] else f"(it was {right[i]})")
            for i in order
        ]
        lines.append(f"{name}: " + ", ".join(cells))
    return "\n".join(lines)


def _written(tokens: Sequence[int]) -> str:
    parts: list[str] = []
    text = bytearray()
    for token in [*tokens, None]:
        if token is not None and token < notes.BYTES:
            text.append(token)
            continue
        parts.append(" ".join(text.decode("utf-8", "replace").split()))
        text.clear()
        if token is not None:
            parts.append(f"[{_token(token)}]")
    return " ".join(part for part in parts if part)


def _token(token: int) -> str:
    number = token - notes.BYTES - notes.NAMES
    return f"name {token - notes.BYTES}" if number < 0 else f"number {number}"


def show(result: Mapping[str, Any]) -> None:
    """Prints the tables, who is ahead at the last distance, and the sample."""
    distances = result["config"]["distances"]
    for count in result["config"]["counts"]:
        table = Table(title=f"Right answers about {count} notes, after ... bytes")
        for heading in ("", "kept", *(f"{n:,}" for n in distances)):
            table.add_column(heading, justify="right" if heading else "left")
        for name, row in result["models"].items():
            cells = [f"{found['mean']:.0%}" for found in row["right"][str(count)]]
            table.add_row(name, f"{row['state_bytes']:,}", *cells)
        Console().print(table)
        for name, rows in result["ahead"].items():
            last = rows[str(count)][-1]
            print(
                f"{name} after {distances[-1]:,} bytes, against the best of the same "
                f"size ({last['baseline']}): {last['mean']:+.0%} ± {last['error']:.0%}"
            )
    print(f"± is a standard error over texts.\n\n{result['sample']}")


@figure("memories/notes")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws right answers against the text since the notes, one panel a count."""
    counts, distances = (result["config"][name] for name in ("counts", "distances"))
    size = (2.5 + 5.0 * len(counts), 4.8)
    with drawing(
        path, columns=len(counts), size=size, source=source_of(result)
    ) as drawn:
        for axes, count in zip(drawn.grid[0], counts, strict=True):
            last = count == counts[-1]
            for i, (name, row) in enumerate(result["models"].items()):
                found = row["right"][str(count)]
                means = [x["mean"] for x in found]
                errors = [
                    [max(0.0, x["mean"] - x["low"]) for x in found],
                    [max(0.0, x["high"] - x["mean"]) for x in found],
                ]
                drawn.line(axes, distances, means, name, i, errors=errors, named=last)
            log_ticks(axes, distances)
            axes.set(title=f"{count} notes", xlabel="bytes of text since the notes")
        drawn.grid[0, 0].set_ylabel("right answers")
