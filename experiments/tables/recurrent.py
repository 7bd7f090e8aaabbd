"""Tables of the experiments with recurrent mechanisms and with Elastic Memory."""

from typing import Any

from experiments.lab.intervals import format_interval
from experiments.tables.table import Table, Tables, load, number, spread, times


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


def elastic_sampling() -> Table:
    """One trained memory, read with other samplings."""
    rows = []
    for row in load("elastic/sampling")["rows"]:
        change = row["change"]
        if not isinstance(change, str):
            change = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in change.items())
        low, high = row["interval"]
        cost = {"nats": row["nats_against_trained"], "low": low, "high": high}
        nats = "" if change == "as trained" else format_interval(cost, 4)
        rows.append([change, number(row["beyond_window"], 1), nats])
    header = ["read", "PPL beyond the window", "nats a token lost against as trained"]
    return Table(header, rows, ["elastic/sampling"])


def elastic_step() -> Table:
    """Seconds of a training step, and throughput against the baseline."""
    rows = [
        [name, number(row["median_s"], 2), times(row["throughput_ratio"])]
        for name, row in load("elastic/cost")["step"].items()
    ]
    header = ["mechanisms", "seconds a step", "throughput against its baseline"]
    return Table(header, rows, ["elastic/cost"])


def elastic_length() -> Table:
    """One layer over T tokens, forward and backward."""
    rows = [
        [
            row["mixer"].replace("_", " "),
            number(row["tokens"], 0),
            number(1e6 * row["median_s"] / row["tokens"], 0),
            number((row["temporary_bytes"] or 0) / 2**20, 0),
            number(row["state_bytes"] / 2**20, 1),
        ]
        for row in load("elastic/cost")["length"]
    ]
    header = ["one layer", "tokens", "µs a token", "temporary MiB", "state MiB"]
    return Table(header, rows, ["elastic/cost"])


def elastic_bank() -> Table:
    """The closed form of a bank against the recurrence multiplied out."""
    result = load("elastic/hippo_bank")
    sizes, found = result["config"], result["compared"]
    one = f"N={sizes['order']}, L={sizes['block_length']}"
    whole = (
        f"N={sizes['whole_order']}, {sizes['whole_blocks']} blocks of "
        f"{sizes['whole_block_length']}"
    )
    rows = [
        [f"recurrence, {one}", number(found["recurrence"]["median_s"], 3), ""],
        [
            f"closed form, {one}",
            number(found["closed_form"]["median_s"], 4),
            times(found["speedup"]),
        ],
        [f"closed form, {whole}", number(result["whole_bank"]["median_s"], 2), ""],
    ]
    return Table(["bank", "seconds", "speedup"], rows, ["elastic/hippo_bank"])


def elastic_reconstruction() -> Table:
    """Table 12 of the paper."""
    rows = [
        [
            row["name"],
            f"{row['paper']:.1e}",
            f"{row['mse_median']:.1e}",
            f"{row['mse_min']:.1e}",
            f"{row['mse_max']:.1e}",
        ]
        for row in load("elastic/hippo_reconstruction")["rows"]
    ]
    header = ["signal", "MSE in the paper", "ours, median", "least", "greatest"]
    return Table(header, rows, ["elastic/hippo_reconstruction"])


TABLES: Tables = {
    "memories/trellis_ablation": trellis_ablation,
    "memories/lattice_ablation": lattice_ablation,
    "memories/trellis_steps": trellis_steps,
    "memories/recall": recall,
    "memories/recall_length": recall_length,
    "elastic/sampling": elastic_sampling,
    "elastic/step": elastic_step,
    "elastic/length": elastic_length,
    "elastic/bank": elastic_bank,
    "elastic/reconstruction": elastic_reconstruction,
}
