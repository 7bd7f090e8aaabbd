"""Tables of the experiments with recurrent mechanisms and with Elastic Memory."""

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
    return _ablation("memories/trellis_ablation")


def lattice_ablation() -> Table:
    """The parts of Lattice."""
    return _ablation("memories/lattice_ablation")


def trellis_steps() -> Table:
    """Recall and perplexity on validation data, and the perplexity of n-grams."""
    result = load("memories/trellis_steps")
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
    return Table(header, rows, ["memories/trellis_steps"])


def _columns(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({row["pairs"] for row in rows})


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """Mean and error over seeds of a model at a number of pairs."""
    return {
        (row["name"], row["pairs"]): spread(row["mean"], row["error"], 2)
        for row in rows
    }


def recall() -> Table:
    """Right answers of every mechanism by pairs, at a length that has room for all."""
    result = load("memories/recall")
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
    return Table(header, table, ["memories/recall"])


def recall_length() -> Table:
    """Recall of every mechanism by sequence length, at a few pairs."""
    result = load("memories/recall")
    count = result["task"]["pairs"][1]
    lengths = result["task"]["lengths"]
    cells = {n: _cells(result["accuracy"][str(n)]) for n in lengths}
    names = dict.fromkeys(row["name"] for row in result["rows"])
    rows = [[name, *(cells[n][name, count] for n in lengths)] for name in names]
    header = [f"right answers, {count} pairs", *(f"{n:,} tokens" for n in lengths)]
    return Table(header, rows, ["memories/recall"])


TABLES: Tables = {
    "memories/trellis_ablation": trellis_ablation,
    "memories/lattice_ablation": lattice_ablation,
    "memories/trellis_steps": trellis_steps,
    "memories/recall": recall,
    "memories/recall_length": recall_length,
}
