"""Tables of the comparisons of recurrent mixers."""

from typing import Any

from experiments.tables.table import Table, Tables, load, number, spread


def _ablation(name: str) -> Table:
    """Right answers of every variant by pairs, and what the paper has for it."""
    result = load(name)
    by = _cells(result["accuracy"])
    pairs = _columns(result["accuracy"])
    rows = [
        [n, *(by.get((n, p), "") for p in pairs), number(result["paper"].get(n), 2)]
        for n in dict.fromkeys(row["name"] for row in result["accuracy"])
    ]
    header = ["right answers", *(f"{p} pairs" for p in pairs)]
    return Table([*header, "PPL in the paper, 125M"], rows, [name])


def trellis_ablation() -> Table:
    """The parts of Trellis."""
    return _ablation("recurrent/trellis_ablation")


def lattice_ablation() -> Table:
    """The parts of Lattice."""
    return _ablation("recurrent/lattice_ablation")


def trellis_steps() -> Table:
    """Recall and perplexity on validation data, and the perplexity of n-grams."""
    result = load("recurrent/trellis_steps")
    columns = {"validation": "right answers", "perplexity": "PPL per byte"}
    found = {
        metric: {
            row["name"]: spread(row["mean"], row["error"], 2) for row in result[metric]
        }
        for metric in columns
        if metric in result
    }
    rows = [
        [name, *(cells.get(name, "") for cells in found.values())]
        for name in found["validation"]
    ]
    rows += [[name, "", number(value, 2)] for name, value in result["ngrams"].items()]
    header = ["validation data", *(columns[metric] for metric in found)]
    return Table(header, rows, ["recurrent/trellis_steps"])


def _columns(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["pairs"] for row in rows})


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """Mean and error over seeds of a model at a number of pairs."""
    return {
        (row["name"], row["pairs"]): spread(row["mean"], row["error"], 2)
        for row in rows
    }


def recall() -> Table:
    """Right answers of every mixer by pairs, at a length that has room for all."""
    result = load("recurrent/recall")
    length = result["task"]["lengths"][1]
    rows = result["accuracy"][str(length)]
    pairs, cells = _columns(rows), _cells(rows)
    runs = {row["name"]: row for row in result["rows"]}
    table = [
        [
            name,
            number(run["state_bytes"], 0),
            f"{run['learning_rate']:g}",
            *(cells[name, count] for count in pairs),
        ]
        for name, run in runs.items()
    ]
    header = ["right answers", "state bytes", "learning rate"]
    header += [f"{count} pairs" for count in pairs]
    return Table(header, table, ["recurrent/recall"])


def recall_length() -> Table:
    """Right answers of every mixer by the length of the sequence, at a few pairs."""
    result = load("recurrent/recall")
    count = result["task"]["pairs"][1]
    lengths = result["task"]["lengths"]
    cells = {n: _cells(result["accuracy"][str(n)]) for n in lengths}
    names = dict.fromkeys(row["name"] for row in result["rows"])
    rows = [[name, *(cells[n][name, count] for n in lengths)] for name in names]
    header = [f"right answers, {count} pairs", *(f"{n:,} tokens" for n in lengths)]
    return Table(header, rows, ["recurrent/recall"])


# Of the mean step sizes that were measured; the file has more.
_GAMMAS = (0.03, 0.3)


def lattice_chunks() -> Table:
    """Errors of chunks and of refined chunks; DEC, keys of unit norm."""
    found = [
        row
        for row in load("recurrent/lattice_chunks")["errors"]
        if row["variant"] == "dec" and row["keys"] == "unit" and row["gamma"] in _GAMMAS
    ]
    rows = [
        [
            f"γ = {row['gamma']}, C = {row['chunk_size']}",
            f"{row['chunk_error']:.0e}",
            f"{row['refined_error']:.0e}",
            number(row["rounds_mean"], 1),
        ]
        for row in found
    ]
    header = ["", "error of chunks", "error when refined", "rounds, mean"]
    return Table(header, rows, ["recurrent/lattice_chunks"])


def lattice_times() -> Table:
    """Forward time of each form of Lattice, DEC."""
    rows = [
        [row["form"], number(1e3 * row["median_s"], 1), number(row["speedup"], 2)]
        for row in load("recurrent/lattice_chunks")["times"]
        if row["variant"] == "dec"
    ]
    header = ["form", "ms", "times the speed of the token scan"]
    return Table(header, rows, ["recurrent/lattice_chunks"])


TABLES: Tables = {
    "recurrent/trellis_ablation": trellis_ablation,
    "recurrent/lattice_ablation": lattice_ablation,
    "recurrent/trellis_steps": trellis_steps,
    "recurrent/recall": recall,
    "recurrent/recall_length": recall_length,
    "recurrent/lattice_chunks": lattice_chunks,
    "recurrent/lattice_times": lattice_times,
}
