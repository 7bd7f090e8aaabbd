"""Tables of the comparisons of recurrent mixers."""

from typing import Any

from experiments.tables.table import Table, Tables, load, number, spread


def _ablation(name: str) -> Table:
    """Perplexity of every variant, and what the paper has for it."""
    result = load(name)
    rows = [
        [
            row["name"],
            spread(row["mean"], row["error"], 2),
            spread(row["difference"], row["difference_error"], 2),
            number(result["paper"].get(row["name"]), 2),
        ]
        for row in result["perplexity"]
    ]
    header = ["", "PPL", "difference, paired by seed", "PPL in the paper, 125M"]
    return Table(header, rows, [name])


def trellis_ablation() -> Table:
    """The parts of Trellis; differences are against Trellis."""
    return _ablation("recurrent/trellis_ablation")


def lattice_ablation() -> Table:
    """The parts of Lattice; differences are against the normalised projection."""
    return _ablation("recurrent/lattice_ablation")


def _by(rows: list[dict[str, Any]], field: str, digits: int) -> list[list[str]]:
    """One row a model, one column a value of the field."""
    columns = sorted({row[field] for row in rows})
    names = dict.fromkeys(row["name"] for row in rows)
    cells = {(r["name"], r[field]): spread(r["mean"], r["error"], digits) for r in rows}
    return [[n, *(cells.get((n, c), "") for c in columns)] for n in names]


def context_length() -> Table:
    """Perplexity by mixer and training context."""
    rows = load("recurrent/context_length")["perplexity"]
    lengths = sorted({row["context_length"] for row in rows})
    header = ["PPL", *(f"{n} tokens" for n in lengths)]
    cells = _by(rows, "context_length", 2)
    return Table(header, cells, ["recurrent/context_length"])


def recall() -> Table:
    """Accuracy of multi-query recall by mixer and number of pairs."""
    rows = load("recurrent/recall")["accuracy"]["MQAR"]
    pairs = sorted({row["pairs"] for row in rows})
    header = ["accuracy", *(f"{n} pairs" for n in pairs)]
    return Table(header, _by(rows, "pairs", 2), ["recurrent/recall"])


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
    "recurrent/context_length": context_length,
    "recurrent/recall": recall,
    "recurrent/lattice_chunks": lattice_chunks,
    "recurrent/lattice_times": lattice_times,
}
