"""Results of the comparison at equal bytes: summary and tables.

Rows are compared in pairs, on the same documents, with the wide window of the fewest
bytes that are not below theirs: a tuned row with a tuned one of its seed. If both wide
windows have fewer bytes, the larger of the two is the baseline.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.intervals import select_kind
from experiments.lab.measure import KINDS, binned_losses
from experiments.lab.results import Rows, number, table, write_report
from experiments.lab.study import stored
from experiments.memories.equal_bytes_rows import ROWS
from memjax import evaluation
from memjax.evaluation.statistics import loss_difference_by_document

QUESTION = "which memory, and does it beat a window of equal bytes?"
#: The result file, without its folder, in which all rows are put together.
SUMMARY = "memories/equal_bytes"
#: Windows that other rows are compared with; tuned ones with "-tuned".
WIDE = ("wide", "wide-shared")
Result = dict[str, Any]


def write(folder: Path) -> None:
    """Puts the rows of a folder together, in the order of `ROWS`."""
    write_report(folder, QUESTION, {}, summary(stored(folder, ROWS)))


def summary(rows: Sequence[Result]) -> Result:
    """All columns of all rows, and their loss difference from the wide window."""
    first = rows[0]
    for row in rows:
        for field in ("texts_digest", "edges", "bins", "layers"):
            if row[field] != first[field]:
                raise ValueError(
                    f"{row['name']} and {first['name']} cannot be compared: "
                    f"{field} must be {first[field]}, got {row[field]}"
                )
    by_name = {(row["name"], row["seed"]): row for row in rows}
    return {
        "edges": first["edges"],
        "bins": first["bins"],
        "documents": len(first["documents"]),
        "rows": [_columns(row, _baseline(row, by_name)) for row in rows],
    }


def _baseline(row: Result, rows: Mapping[tuple[str, int], Result]) -> Result | None:
    """The wide window that a row is compared with, unless it is one itself."""
    tuned = "" if row["training"] is None else "-tuned"
    names = [(name + tuned, row["seed"]) for name in WIDE]
    windows = sorted(
        (rows[name] for name in names if name in rows), key=lambda x: x["bytes"]
    )
    if not windows or row in windows:
        return None
    enough = [window for window in windows if window["bytes"] >= row["bytes"]]
    return (enough or windows[-1:])[0]


def _columns(row: Result, base: Result | None) -> Result:
    bins = tuple(row["bins"])
    scored = binned_losses(row["documents"], bins)
    kept = ("label", "seed", "bytes", "training")
    found = {"row": row["name"]} | {name: row[name] for name in kept}
    found["perplexity"] = {k: evaluation.perplexity(scored, kind=k) for k in KINDS}
    if base is not None:
        other = binned_losses(base["documents"], bins)
        found["saved_over"] = base["label"]
        found["saved"] = {
            kind: loss_difference_by_document(
                select_kind(other, kind), select_kind(scored, kind)
            )._asdict()
            for kind in KINDS
        }
    return found


def _name(row: Result) -> str:
    return row["label"] + (f", seed {row['seed']}" if row["training"] else "")


@table("memories/perplexity", SUMMARY)
def perplexity(result: Result) -> Rows:
    """State size and perplexity by kind of text."""
    for row in result["rows"]:
        yield {"": _name(row), "state size, bytes": number(row["bytes"], 0)} | {
            f"PPL, {kind}": number(row["perplexity"][kind], 2) for kind in KINDS
        }


@table("memories/saved", SUMMARY)
def saved(result: Result) -> Rows:
    """Loss difference from the window with the same state size, and 95% intervals."""
    for row in result["rows"]:
        if "saved" in row:
            yield (
                {"loss difference, nats/token": _name(row)}
                | {
                    kind: "{nats:+.3f} ({low:+.3f} to {high:+.3f})".format(**found)
                    for kind, found in row["saved"].items()
                }
                | {"state size, bytes": number(row["bytes"], 0)}
                | {"baseline": row["saved_over"]}
            )
    yield "the hypothesis is of shared memories; all other rows explore"
