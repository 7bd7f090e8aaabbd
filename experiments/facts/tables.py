"""Output of the study of facts: verdict, table, plot, bars, answers in words."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.facts import task
from experiments.lab.intervals import median_and_range
from experiments.lab.results import Rows, figure, load, number, show, table
from memjax.evaluation.drawing import drawing, log_ticks, source_of

CACHE, RIVALS = "learned cache", ("sliding window", "learned cache", "GRU")
#: Distance of the second falsifier, and the share that has to be held there.
FAR, HALF = 262_144, 0.5
#: Characters of a full bar; questions that are shown.
BAR, SHOWN = 40, 6


def shares(row: Mapping[str, Any], count: int, i: int) -> list[float]:
    """Right answers at a distance with each seed; a training that diverged has none."""
    return [
        float(np.mean(run["right"][str(count)][i])) if "right" in run else 0.0
        for run in row["runs"]
    ]


def by_distance(result: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Medians over seeds of right answers of a row, or a baseline's, by distance."""
    budget, listed = next(iter(result["baselines"].items()))
    if name in listed:
        return listed[name][str(count)]
    row, distances = result["rows"][f"{name}, {budget}"], result["config"]["distances"]
    return [float(np.median(shares(row, count, i))) for i in range(len(distances))]


def verdict(result: Mapping[str, Any]) -> Iterator[str]:
    """Results of both falsifiers at each budget, by medians over seeds."""
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    rows = result["rows"].values()
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of = {row["name"]: row for row in rows if row["budget"] == budget}
        memories = [name for name in of if name not in RIVALS]
        if CACHE not in of or not memories:
            yield f"{budget:,} bytes: not decided, rows are missing"
            continue

        def median(name: str, count: int, i: int, of=of) -> float:
            return float(np.median(shares(of[name], count, i)))

        behind = [
            n
            for n in counts[-2:]
            if median(CACHE, n, 0) > max(median(name, n, 0) for name in memories)
        ]
        far = [i for i, distance in enumerate(distances) if distance >= FAR]
        held = [max(median(name, counts[0], i) for name in memories) for i in far[:1]]
        wrong = []
        if len(behind) == len(counts[-2:]):
            wrong.append("the learned cache is ahead of every memory")
        if held and held[0] < HALF:
            late = f"{distances[far[0]]:,} bytes later"
            wrong.append(f"no memory holds half of {counts[0]} facts {late}")
        open_ = "" if held else f"; {FAR:,} bytes later was not asked"
        yield f"{budget:,} bytes: " + (
            "falsified: " + "; ".join(wrong) if wrong else f"holds{open_}"
        )


@table("facts/study")
def right(result: Mapping[str, Any]) -> Rows:
    """Right answers of all rows by facts and bytes since the log."""
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    chosen = (0, len(distances) // 2, len(distances) - 1)

    def cells(of) -> dict[str, str]:
        return {
            f"{n} facts, {distances[i]:,} later": of(n, i)
            for n in counts
            for i in dict.fromkeys(chosen)
        }

    for row in result["rows"].values():
        yield {
            "right answers": row["name"],
            "state, bytes": number(row["state_bytes"], 0),
            **cells(lambda n, i, row=row: median_and_range(shares(row, n, i))),
        }
    for budget, found in result["baselines"].items():
        for name, by_count in found.items():
            yield {
                "right answers": name,
                "state, bytes": number(int(budget), 0),
                **cells(lambda n, i, by=by_count: number(by[str(n)][i], 2)),
            }
    seeds = {len(row["runs"]) for row in result["rows"].values()}
    if seeds != {1}:
        yield f"median (range) over {min(seeds)} seeds"
    yield from verdict(result)


@figure("facts/study")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Right answers against the text since the log, one panel a count of facts."""
    counts, distances = (result["config"][name] for name in ("counts", "distances"))
    size = (2.5 + 5.0 * len(counts), 4.8)
    budget = int(next(iter(result["baselines"])))
    with drawing(
        path, columns=len(counts), size=size, source=source_of(result)
    ) as drawn:
        for axes, n in zip(drawn.grid[0], counts, strict=True):
            rows = (x["name"] for x in result["rows"].values() if x["budget"] == budget)
            for i, name in enumerate((*rows, *result["baselines"][str(budget)])):
                line = by_distance(result, name, n)
                drawn.line(axes, distances, line, name, i, named=n == counts[-1])
            log_ticks(axes, distances)
            axes.set(title=f"{n} facts", xlabel="bytes of text since the log")
        drawn.grid[0, 0].set_ylabel("right answers")


def print_all(result: Mapping[str, Any], streams: Mapping[int, task.Stream]) -> None:
    """Prints tables, bars and answers in words."""
    counts, distances = (result["config"][name] for name in ("counts", "distances"))
    show("Right answers by facts of a log and bytes since", right.rows(result))
    show("The same as recorded, with more seeds", right.rows(load("facts/study")))
    n, rows = counts[len(counts) // 2], result["rows"].values()
    width = max(len(row["name"]) for row in rows) + 1
    for i in (0, len(distances) - 1):
        print(f"\n{n} facts, asked {distances[i]:,} bytes later:")
        for row in rows:
            share = float(np.median(shares(row, n, i)))
            bar = "█" * round(BAR * share)
            print(f"  {row['name']:{width}}{bar:{BAR}} {share:.0%}")
    stream = streams[n]
    print(f"\nOf one log, {distances[-1]:,} bytes later:")
    for k in range(min(SHOWN, n)):
        name = task.NAMES[int(stream.log.names[0, k])]
        code = int(stream.log.codes[0, k])
        said = (
            f"{row['name']} {'right' if run['first'][str(n)][-1][k] else 'wrong'}"
            for row in rows
            for run in row["runs"][:1]
            if "first" in run
        )
        print(f"  {name} is {code}: {', '.join(said)}")
