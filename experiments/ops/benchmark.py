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

import concurrent.futures
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.common.results import RESULTS, settings, write_report
from experiments.common.timing import time_functions
from experiments.ops import baselines, cases
from experiments.ops.cases import Shape
from experiments.ops.cost import DEVICES, Device, roofline_seconds
from memjax.evaluation.drawing import drawing, log_ticks, log_values, source_of

# Shapes of the papers' and flash-linear-attention's benchmarks; then one for a CPU.
SHAPES = ((8, 2048, 12, 64), (2, 16384, 16, 128), (1, 65536, 12, 64))
CPU_SHAPES = ((1, 4096, 4, 64),)
# Relative RMS from the token loop, by dtype of the inputs.
AGREEMENT = {"float32": 1e-4, "bfloat16": 3e-2}
# Rows of the product and floats of the copy that show the peaks of a CPU.
PRODUCT, COPY = 2048, 2**26


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result.

    Attributes:
        ops: which ops.
        shapes: (batch, tokens, heads, width); empty is `SHAPES`, on a CPU `CPU_SHAPES`.
        lengths: tokens at which growth is timed, batch and heads of the first shape.
        chunk_size: of TTT-linear, Trellis and Lattice.
        dtype: of the inputs; None is bfloat16, on a CPU float32.
        longest_loop: the token loop is timed up to this many tokens.
        longest_attention: attention is timed up to this many tokens; None is 65,536,
            on a CPU 8,192, where it holds all scores.
        repeats: timings of each, at least 1; None is 20, on a CPU 5.
        output: where .json and .png go, without the ending.
    """

    ops: tuple[str, ...] = tuple(cases.ARGUMENTS)
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    lengths: tuple[int, ...] = (1024, 4096, 8192, 16384)
    chunk_size: int = 64
    dtype: str | None = None
    longest_loop: int = 4096
    longest_attention: int | None = None
    repeats: int | None = None
    output: pathlib.Path = RESULTS / "ops" / "kernels"

    def __post_init__(self) -> None:
        """Refuses what cannot be timed."""
        unknown = set(self.ops) - set(cases.ARGUMENTS)
        if unknown:
            raise ValueError(f"ops must be of {tuple(cases.ARGUMENTS)}, got {unknown}")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


def settle(config: Config) -> Config:
    """Fills in what depends on the device."""
    cpu = jax.default_backend() == "cpu"
    return dataclasses.replace(
        config,
        shapes=config.shapes or (CPU_SHAPES if cpu else SHAPES),
        dtype=config.dtype or ("float32" if cpu else "bfloat16"),
        longest_attention=config.longest_attention or (8192 if cpu else 65536),
        repeats=config.repeats or (5 if cpu else 20),
    )


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


def implementations(op: str, shape: Shape, config: Config) -> list[str]:
    """What runs here for these inputs, the token loop where it is not too long."""
    if op == "attention":
        if shape.time > (config.longest_attention or 0):
            return []
        gpu = jax.default_backend() == "gpu"
        return ["cudnn"] if gpu and config.dtype == "bfloat16" else ["xla"]
    found = []
    arrays = cases.inputs(op, shape, str(config.dtype))
    for name in cases.written(op):
        if name == "reference" and shape.time > config.longest_loop:
            continue
        function = cases.forward(op, name, config.chunk_size)
        try:
            jax.eval_shape(function, *arrays.values())
        except ValueError:
            continue  # The op says that this one does not run here.
        found.append(name)
    return found


def check(op: str, shape: Shape, config: Config) -> dict[str, float | str]:
    """By implementation its relative RMS error at a short odd length, or why it failed.

    An error that is too large is a failure too.
    """
    if op == "attention":
        return {}
    short = shape._replace(batch=1, time=2 * config.chunk_size + 17)
    arrays = cases.inputs(op, short, str(config.dtype))
    exact = cases.forward(op, "reference", config.chunk_size)
    wanted = np.asarray(jax.jit(exact)(*arrays.values()), np.float32)
    found = {}
    for name in implementations(op, short, config):
        run = jax.jit(cases.forward(op, name, config.chunk_size))
        found[name] = np.asarray(run(*arrays.values()), np.float32)
    failed: dict[str, float | str] = {}
    if baselines.available():
        ways = baselines.ways(op, arrays, str(config.dtype), config.chunk_size)
        for name, (same, run, _) in ways.items():
            try:
                y = run().float().cpu().numpy()
            except Exception as error:  # Some versions refuse some devices.
                failed[name] = first_line(error)
                continue
            if same:
                found[name] = y
    scale = np.sqrt(np.mean(wanted**2))
    for name, y in found.items():
        error = float(np.sqrt(np.mean((y - wanted) ** 2)) / scale)
        agrees = error <= AGREEMENT[str(config.dtype)]
        failed[name] = error if agrees else f"{error:.1e} from the token loop"
    return failed


def first_line(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Way(NamedTuple):
    """One implementation of a pass.

    Attributes:
        run: a call that waits for its result.
        temporary_bytes: as the compiler says; None where it does not.
        ours: not a baseline, which may fail.
    """

    run: Callable[[], Any]
    temporary_bytes: int | None
    ours: bool


def compiled_calls(
    op: str, shape: Shape, config: Config, left_out: Collection[str] = ()
) -> dict[tuple[str, str], Way]:
    """By implementation and pass, but for those that are left out."""
    arrays = cases.inputs(op, shape, str(config.dtype))
    cotangent = jax.random.normal(jax.random.key(1), arrays["v"].shape)
    cotangent = cotangent.astype(arrays["v"].dtype)
    ways: dict[tuple[str, str], Way] = {}
    for name in implementations(op, shape, config):
        if name in left_out:
            continue
        function = cases.forward(op, name, config.chunk_size)
        for direction, run, given in (
            ("forward", function, tuple(arrays.values())),
            ("both", cases.both(function), (cotangent, *arrays.values())),
        ):
            compiled = jax.jit(run).lower(*given).compile()
            analysis = compiled.memory_analysis()
            temporary = getattr(analysis, "temp_size_in_bytes", None)
            call = lambda c=compiled, a=given: jax.block_until_ready(c(*a))
            ways[name, direction] = Way(call, temporary, True)
    if baselines.available():
        others = baselines.ways(op, arrays, str(config.dtype), config.chunk_size)
        for name, (_, forward, backward) in others.items():
            if name not in left_out:
                ways[name, "forward"] = Way(forward, None, False)
                ways[name, "both"] = Way(backward, None, False)
    return ways


def measure(
    op: str,
    shape: Shape,
    config: Config,
    device: Device,
    ways: dict[tuple[str, str], Way],
) -> tuple[list[dict], list[dict]]:
    """One row for every implementation and pass, and one for each that failed."""
    of = {"op": op} | shape._asdict()
    failed = []
    for (name, direction), way in list(ways.items()):
        try:
            way.run()
        except Exception as error:
            if way.ours:
                raise
            del ways[name, direction]
            row = {"implementation": name, "pass": direction}
            failed.append(of | row | {"why": first_line(error)})
    names = {"/".join(key): key for key in ways}
    times = time_functions(
        {n: ways[key].run for n, key in names.items()}, config.repeats or 1
    )
    rows = []
    for label, (name, direction) in names.items():
        cost = cases.cost(
            op, shape, config.chunk_size, str(config.dtype), direction == "both"
        )
        median = times[label]["median_s"]
        rows.append(
            of
            | {"implementation": name, "pass": direction}
            | times[label]
            | {
                "tokens_per_s": shape.batch * shape.time / median,
                "temporary_bytes": ways[name, direction].temporary_bytes,
                "flops": cost.flops,
                "bytes": cost.bytes,
                "times_roofline": median / roofline_seconds(cost, device),
            }
        )
    return rows, failed


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
        _print(result[into][before:], console)
        save(result)

    for sizes in config.shapes:
        shape = Shape(*sizes)
        for op in config.ops:
            key = f"{op} {shape.width}"
            if key not in result["agreement"]:
                result["agreement"][key] = check(op, shape, config)
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


def compile_all(
    cases: list[tuple[str, Shape]], config: Config, agreement: dict[str, dict]
) -> list[tuple[tuple[str, Shape], dict[tuple[str, str], Way]]]:
    """The ways of every case, compiled side by side, before any is timed."""

    def compiled(case):
        op, shape = case
        errors = agreement[f"{op} {shape.width}"]
        left_out = [name for name, error in errors.items() if isinstance(error, str)]
        return case, compiled_calls(op, shape, config, left_out)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, cases))


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
