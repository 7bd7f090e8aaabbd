"""Tables of the experiments with Elastic Memory."""

from experiments.tables.table import Table, Tables, load, number, times


def sampling() -> Table:
    """One trained memory, read with other samplings."""
    rows = []
    for row in load("elastic/sampling")["rows"]:
        change = row["change"]
        if not isinstance(change, str):
            change = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in change.items())
        nats = number(row["nats_against_trained"], 4)
        rows.append([change, number(row["beyond_window"], 1), nats])
    header = ["read", "PPL beyond the window", "nats a token against as trained"]
    return Table(header, rows, ["elastic/sampling"])


def step() -> Table:
    """Seconds of a training step, and throughput against the baseline."""
    rows = [
        [name, number(row["median_s"], 2), times(row["throughput_ratio"])]
        for name, row in load("elastic/cost")["step"].items()
    ]
    header = ["mixers", "seconds a step", "throughput against its baseline"]
    return Table(header, rows, ["elastic/cost"])


def length() -> Table:
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


def bank() -> Table:
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


def reconstruction() -> Table:
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
    "elastic/sampling": sampling,
    "elastic/step": step,
    "elastic/length": length,
    "elastic/bank": bank,
    "elastic/reconstruction": reconstruction,
}
