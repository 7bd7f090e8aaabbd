"""What the alignment of each memory has come to: its table's numbers and its plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.results import figure, write_report
from experiments.memories.alignment_memories import MEMORIES
from experiments.memories.documents import KINDS
from memjax.evaluation.drawing import COLOURS, drawing, source_of
from memjax.evaluation.statistics import paired

WINDOW, WIDE = "window", "wide window"
#: Longer by the bytes of a memory that the three query heads of a group share.
WIDE_SHARED = "wide window of a third"
#: The result of these three.
WINDOWS = "windows"
QUESTION = "which memory comes nearest to full attention in as many bytes?"


def result_file(folder: Path, name: str) -> Path:
    """Where the result of a memory lies, or that of the windows."""
    return folder / f"{name.lower().replace(',', '').replace(' ', '-')}.json"


def load_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a folder, those of the windows first.

    Raises:
        ValueError: if two were measured with other settings or on other documents.
    """
    files = [result_file(folder, name) for name in (WINDOWS, *MEMORIES)]
    found = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    alike = lambda result: (result["config"] | {"only": []}, result["documents"])
    for result in found[1:]:
        if alike(result) != alike(found[0]):
            raise ValueError(
                f"{result['rows'][0]['name']} and {found[0]['rows'][0]['name']} cannot "
                "be compared: their settings must be equal, and their documents"
            )
    return found


def write(folder: Path) -> dict[str, Any]:
    """Writes and draws the results of a folder together, beside it."""
    found = load_results(folder)
    rows = [row for result in found for row in result["rows"]]
    documents = found[0]["documents"]
    sizes = {k: n for result in found for k, n in result["bytes"].items()}
    lines = summary(rows, list(documents.values()), sizes)
    known = {line["name"] for line in lines}
    result = write_report(
        folder,
        QUESTION,
        found[0]["config"] | {"only": []},
        {
            "bytes": sizes,
            "rates": {
                result["rows"][0]["name"]: result["tried"]["rate"]
                for result in found
                if "tried" in result
            },
            "summary": lines,
            "missing": [name for name in MEMORIES if name not in known],
        },
    )
    plot(result, folder.with_suffix(".png"))
    return result


def summary(
    rows: Sequence[dict[str, Any]], kinds: Sequence[str], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Of each row by kind: the mean share, and what is won over a wide window.

    Args:
        rows: name and the shares of documents, a seed each.
        kinds: of the documents.
        sizes: bytes of each row; it is compared with the window of the fewest bytes
            that are not below its own.
    """
    by_name: dict[str, list] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["missed"])
    means = {name: np.mean(found, axis=0) for name, found in by_name.items()}
    windows = [name for name in (WIDE_SHARED, WIDE) if name in means]
    found = []
    for name, values in means.items():
        base = name
        if name not in windows:
            enough = [window for window in windows if sizes[window] >= sizes[name]]
            base = enough[0] if enough else WIDE
        line: dict[str, Any] = {"name": name, "base": base, "seeds": len(by_name[name])}
        for kind in KINDS:
            of_kind = np.asarray(kinds) == kind
            won = paired(means[base][of_kind], values[of_kind])
            line[kind] = {"missed": float(values[of_kind].mean()), **won._asdict()}
        found.append(line)
    return found


@figure("memories/alignment")
def plot(result: dict[str, Any], path: Path) -> None:
    """What each row misses of each kind, with the wide windows as lines."""
    rows = result["summary"]
    with drawing(
        path,
        columns=len(KINDS),
        size=(10, 1.5 + 0.3 * len(rows)),
        title=f"Share of full attention's output that is missed in layer "
        f"{result['config']['layer']}",
        source=source_of(result),
        sharey=True,
    ) as drawn:
        for number, kind in enumerate(KINDS):
            axes = drawn.grid[0, number]
            values = [row[kind]["missed"] for row in rows]
            axes.barh([row["name"] for row in rows], values, color=COLOURS[number])
            for row in rows:
                if row["name"] in (WIDE, WIDE_SHARED):
                    axes.axvline(row[kind]["missed"], color="0.3", linestyle="--")
            axes.set(title=kind, xlabel="share missed")
        drawn.grid[0, 0].invert_yaxis()
