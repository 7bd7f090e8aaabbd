"""How fast are the ops?

    OPENBLAS_NUM_THREADS=1 python -m experiments.ops.benchmark

Times every op in every implementation that runs here, forward, and forward with
backward. Timing is interleaved; reported are median, fastest and slowest of `repeats`,
tokens a second, the compiler's peak of temporary memory, and operations and bytes by
the op's own formula. The distance to the roofline is the time over the least time that
the device allows. Its peaks are the maker's on a GPU or TPU. On a CPU they are measured
first, by one matrix product and one copy.

Beside the ops are timed our token loop, causal attention (cuDNN on a GPU), and
flash-linear-attention where it is installed (see `baselines.py`). Each implementation
must first agree with the token loop: one that does not, or does not run, is named and
not timed, and the exit code is 1 if it is ours. Then Trellis, Lattice and attention are
timed against length. Writes a table, a JSON and a plot, anew after every shape.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from experiments.lab.results import figure, settings, write_report
from experiments.lab.timing import time_functions
from experiments.ops import cases
from experiments.ops.cases import Shape
from experiments.ops.config import Config, settle
from experiments.ops.cost import DEVICES, Device
from experiments.ops.ways import check_all, compile_all, measure
from memjax.evaluation.drawing import drawing, log_ticks, log_values, source_of

# Rows of the product and floats of the copy that show the peaks of a CPU.
PRODUCT, COPY = 2048, 2**26


def this_device(rows: int = PRODUCT, floats: int = COPY) -> tuple[str, Device]:
    """Peaks of the device, by its maker or, for a CPU, as one product and copy show."""
    kind = jax.devices()[0].device_kind
    names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    for name, device in DEVICES.items():
        if name in kind or names.get(kind) == name:
            return f"{name}, as published", device
    square = jnp.ones((rows, rows))
    line = jnp.ones(floats)
    product = jax.jit(lambda x: x @ x).lower(square).compile()
    # In place: a new page costs more than its bytes.
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(line).compile()
    holder = [line]

    def copy():
        holder[0] = jax.block_until_ready(add(holder[0]))

    ways = {"product": lambda: jax.block_until_ready(product(square)), "copy": copy}
    times = time_functions(ways, 7)
    flops = 2 * rows**3 / times["product"]["min_s"]
    return f"{kind}, measured", Device(flops, 8 * floats / times["copy"]["min_s"])


def run(config: Config, console: Console, save: Callable[[dict], None]) -> dict:
    """Checks, then times; `save` gets the results so far after every shape."""
    config = settle(config)
    name, device = this_device()
    console.print(
        f"{name}: {device.flops / 1e9:.0f} GFLOP/s, {device.bandwidth / 1e9:.0f} GB/s"
    )
    result: dict[str, Any] = {"peaks": {"of": name} | device._asdict()}
    result |= {"agreement": {}, "shapes": [], "growth": [], "failed": []}

    def time_all(cases: list[tuple[str, Shape]], config: Config, into: str):
        before = len(result[into])
        for (op, shape), ways in compile_all(cases, config, result["agreement"]):
            rows, failed = measure(op, shape, config, device, ways)
            result[into] += rows
            result["failed"] += failed
        if result[into][before:]:
            _print(result[into][before:], console)
        save(result)

    for sizes in config.shapes:
        shape = Shape(*sizes)
        keys = {op: f"{op} {shape.width}" for op in config.ops}
        missing = [op for op in config.ops if keys[op] not in result["agreement"]]
        errors = check_all(missing, shape, config)
        result["agreement"] |= {keys[op]: errors[op] for op in missing}
        time_all([(op, shape) for op in config.ops], config, "shapes")
    first = Shape(*config.shapes[0])._replace(batch=1)
    grown = [op for op in ("trellis", "lattice", "attention") if op in config.ops]
    brief = dataclasses.replace(config, longest_loop=0)
    for length in config.lengths:
        time_all([(op, first._replace(time=length)) for op in grown], brief, "growth")
    for op, errors in result["agreement"].items():
        for name, error in errors.items():
            if isinstance(error, str):
                row = {"op": op, "implementation": name, "why": error}
                result["failed"].append(row)
    for row in result["failed"]:
        console.print("not timed:", *(f"{k} {v}," for k, v in row.items()))
    return result


@figure("ops/kernels")
def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Microseconds a token against T, forward with backward."""
    lines: dict[str, list[dict]] = {}
    for row in result["growth"]:
        if row["pass"] == "both":
            lines.setdefault(f"{row['op']}, {row['implementation']}", []).append(row)
    title, source = "Time of a token, forward and backward", source_of(result)
    with drawing(path, title=title, source=source) as drawn:
        axes = drawn.grid[0, 0]
        for i, (name, rows) in enumerate(lines.items()):
            tokens = [row["time"] for row in rows]
            taken = [1e6 / row["tokens_per_s"] for row in rows]
            drawn.line(axes, tokens, taken, name, i)
        log_values(axes)
        axes.set(xlabel="tokens T", ylabel="µs a token")
        log_ticks(axes, [row["time"] for rows in lines.values() for row in rows])


def main(config: Config) -> int:
    """Times, prints and writes the results; the exit code."""
    begin = time.perf_counter()

    def save(measured):
        measured = measured | {"seconds": time.perf_counter() - begin}
        question = "speed of the ops"
        used = settings(settle(config))
        result = write_report(config.output, question, used, measured)
        if result["growth"]:
            plot(result, pathlib.Path(f"{config.output}.png"))

    measured = run(config, Console(), save)
    save(measured)
    ours = {
        name for op in config.ops if op != "attention" for name in cases.written(op)
    }
    return int(any(row["implementation"] in ours for row in measured["failed"]))


def _print(rows: list[dict], console: Console) -> None:
    """One table for a shape."""
    first = rows[0]
    title = "B={batch} T={time} H={heads} d={width}".format(**first)
    table = Table("op", "code", "pass", "ms (spread)", "tokens/s", "MiB", title=title)
    table.add_column("of roofline", justify="right")
    for row in rows:
        spread = f"({1e3 * row['min_s']:.2f}-{1e3 * row['max_s']:.2f})"
        temporary = row["temporary_bytes"]
        table.add_row(
            row["op"],
            row["implementation"],
            row["pass"],
            f"{1e3 * row['median_s']:.2f} {spread}",
            f"{row['tokens_per_s']:,.0f}",
            "-" if temporary is None else f"{temporary / 2**20:.0f}",
            f"{row['times_roofline']:.1f}x",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config)))
