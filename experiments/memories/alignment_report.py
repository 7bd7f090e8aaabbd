"""Rows and results of the alignment study: memories, summary, table.

Sizes have the bytes of 97 tokens of SmolLM2's keys and values in a layer, or of 33:
then one memory serves the three query heads that share keys and values.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lab.measure import KINDS
from experiments.lab.results import Rows, number, table, thousands, write_report
from memjax.evaluation.statistics import paired
from memjax.models.language_model.retrofit import MemoryName, MemoryOptions

WINDOW, WIDE = "window", "wide window"
#: Longer by the bytes of a memory that the three query heads of a group share.
WIDE_SHARED = "wide window of a third"
#: The result of these three.
WINDOWS = "windows"
QUESTION = "which memory comes nearest to full attention in as many bytes?"


class Memory(NamedTuple):
    """A memory, with sizes of at most the bytes of those keys and values.

    Attributes:
        name: of `add_memory`.
        options: of its sizes.
        started: from the backbone's statistics, or at random.
    """

    name: MemoryName
    options: MemoryOptions = MemoryOptions()
    started: bool = True


MEMORIES: dict[str, Memory] = {
    "Lattice": Memory("lattice", MemoryOptions(slots=32)),
    "Trellis": Memory("trellis", MemoryOptions(slots=14, chunk_size=4)),
    "Elastic, uniform": Memory("elastic", MemoryOptions(order=64)),
    "Elastic, exponential": Memory(
        "elastic", MemoryOptions(order=64, sampling="exponential")
    ),
    "Infini-attention": Memory("infini"),
    "linear attention": Memory("linear_attention"),
    "Mamba-2": Memory("mamba2"),
    "GLA": Memory("gla"),
    "DeltaNet": Memory("deltanet"),
    "Gated DeltaNet": Memory("gated_deltanet"),
    "Gated DeltaNet, random start": Memory("gated_deltanet", started=False),
    "ABC": Memory("abc", MemoryOptions(slots=32)),
    "GSA": Memory("gsa", MemoryOptions(slots=32)),
    "Lattice, shared": Memory("lattice", MemoryOptions("key_value", slots=32)),
    "Trellis, shared": Memory(
        "trellis", MemoryOptions("key_value", slots=14, chunk_size=4)
    ),
    "linear attention, shared": Memory("linear_attention", MemoryOptions("key_value")),
    "Gated DeltaNet, shared": Memory("gated_deltanet", MemoryOptions("key_value")),
    "GSA, shared": Memory("gsa", MemoryOptions("key_value", slots=32)),
}


def result_file(folder: Path, name: str) -> Path:
    """The result of a memory, or that of the windows."""
    return folder / f"{name.lower().replace(',', '').replace(' ', '-')}.json"


def load_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a folder, those of the windows first.

    Raises:
        ValueError: if two were measured with other settings or on other documents.
    """
    files = [result_file(folder, name) for name in (WINDOWS, *MEMORIES)]
    found = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]

    def alike(result: Mapping[str, Any]) -> tuple:
        return result["config"] | {"only": []}, result["documents"]

    for result in found[1:]:
        if alike(result) != alike(found[0]):
            raise ValueError(
                f"{result['rows'][0]['name']} and {found[0]['rows'][0]['name']} cannot "
                "be compared: their settings must be equal, and their documents"
            )
    return found


def write(folder: Path) -> dict[str, Any]:
    """Writes the results of a folder together, as `folder`.json."""
    found = load_results(folder)
    rows = [row for result in found for row in result["rows"]]
    documents = found[0]["documents"]
    sizes = {k: n for result in found for k, n in result["bytes"].items()}
    lines = summary(rows, list(documents.values()), sizes)
    known = {line["name"] for line in lines}
    rates = {
        result["rows"][0]["name"]: result["tried"]["rate"]
        for result in found
        if "tried" in result
    }
    results = {
        "bytes": sizes,
        "rates": rates,
        "summary": lines,
        "missing": [name for name in MEMORIES if name not in known],
    }
    return write_report(folder, QUESTION, found[0]["config"] | {"only": []}, results)


def summary(
    rows: Sequence[dict[str, Any]], kinds: Sequence[str], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The mean share missed by row and kind, and its difference from a wide window.

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


@table("memories/alignment")
def alignment(result: dict[str, Any]) -> Rows:
    """Share of full attention's output that each memory misses in one layer."""

    def difference(line: Mapping[str, Any], kind: str) -> str:
        # A wide window has no difference from itself.
        if line["name"] == line["base"]:
            return ""
        mean, low, high = (f"{line[kind][n]:+.3f}" for n in ("mean", "low", "high"))
        return f"{mean} ({low} to {high})"

    for line in result["summary"]:
        name, rate = line["name"], result["rates"].get(line["name"])
        yield (
            {"share missed": name}
            | {"bytes beside the window": thousands(result["bytes"][name])}
            | {"learning rate": f"{rate:g}" if rate else ""}
            | {kind: number(line[kind]["missed"], 3) for kind in KINDS}
            | {f"less than the baseline, {k}": difference(line, k) for k in KINDS}
            | {"baseline": line["base"] if line["base"] != name else ""}
        )
    for name in result["missing"]:
        yield {"share missed": f"{name}: not run yet"}
