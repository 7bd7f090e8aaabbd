"""Speed of the ops, and their distance from the device's roofline.

    OPENBLAS_NUM_THREADS=1 python -m experiments.speed.ops
    python -m experiments.speed.ops --shapes 8 2048 12 64 0 --dtype bfloat16 \\
        --longest-loop 1000 --longest-attention 65536 --repeats 20 \\
        --output experiments/results/speed/ops_gpu  # on a GPU

Every op in every implementation that runs here, forward and with backward, by
interleaved timing; with it causal attention (cuDNN on a GPU) and, on a GPU where it is
installed, flash-linear-attention. Each must first agree with the token loop: one that
does not, or does not run, is named and not timed, and the exit code is 1 if it is ours.
`times_roofline` is the time over the least that the device allows for the op's
operations and bytes; its peaks are the maker's on a GPU or TPU, and measured on a CPU
by one matrix product and one copy.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import ops
from experiments.lab.ops import Device, Shape
from experiments.lab.options import Count, Flags, Natural, Options, Output, among, run
from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.lab.timing import time_functions
from experiments.speed import fla

#: Relative RMS from the token loop that agrees, by dtype of the inputs.
AGREEMENT = {"float32": 1e-4, "bfloat16": 3e-2}

#: Passes by implementation and direction; each waits for its result.
Calls = dict[tuple[str, str], Callable[[], Any]]
Ops = tuple[Annotated[str, among(*ops.ARGUMENTS)], ...]


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Everything that changes the result.

    Attributes:
        ops: which ops.
        shapes: (batch, tokens, heads, width, key heads), 0 for as many key heads.
        chunk_size: of TTT-linear, Trellis and Lattice.
        dtype: of the inputs.
        longest_loop: the token loop is timed up to this many tokens.
        longest_attention: attention is timed up to this many; on a CPU it stores all
            scores.
        repeats: timings of each.
        output: where .json goes, without the ending.
    """

    ops: Ops = tuple(ops.ARGUMENTS)
    shapes: tuple[tuple[Count, Count, Count, Count, Natural], ...] = (
        (1, 4096, 4, 64, 0),
    )
    chunk_size: Count = 64
    dtype: Annotated[str, among(*AGREEMENT)] = "float32"
    longest_loop: Natural = 4096
    longest_attention: Natural = 8192
    repeats: Count = 5
    output: Output = RESULTS / "speed" / "ops"


def this_device(rows: int = 2048, floats: int = 2**26) -> tuple[str, Device]:
    """Peaks of the device: its maker's or, for a CPU, of a product and a copy."""
    kind = jax.devices()[0].device_kind
    names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
    for name, device in ops.DEVICES.items():
        if name in kind or names.get(kind) == name:
            return f"{name}, as published", device
    square, line = jnp.ones((rows, rows)), jnp.ones(floats)
    product = jax.jit(jnp.matmul).lower(square, square).compile()
    # In place: a new page costs more than its bytes.
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(line).compile()

    def copy() -> None:
        nonlocal line
        line = jax.block_until_ready(add(line))

    functions = {"product": lambda: product(square, square), "copy": copy}
    found = time_functions(functions, 7)
    flops = 2 * rows**3 / found["product"]["min_s"]
    return f"{kind}, measured", Device(flops, 8 * floats / found["copy"]["min_s"])


def runnable(op: str, shape: Shape, config: Config) -> list[str]:
    """Implementations that run here, the token loop where it is not too long."""
    if op == "attention":
        if shape.time > config.longest_attention:
            return []
        gpu = jax.default_backend() == "gpu"
        return ["cudnn"] if gpu and config.dtype == "bfloat16" else ["xla"]
    found = []
    arrays = jax.eval_shape(lambda: ops.inputs(op, shape, config.dtype))
    for name in ops.IMPLEMENTATIONS:
        if name == "reference" and shape.time > config.longest_loop:
            continue
        function = ops.forward(op, name, config.chunk_size)
        try:
            jax.eval_shape(function, *(arrays[x] for x in ops.ARGUMENTS[op]))
        except ValueError:
            continue  # The op says that this one does not run here.
        found.append(name)
    return found


def agreement(op: str, shape: Shape, config: Config) -> dict[str, float | str]:
    """Relative RMS from the token loop by implementation, or why it is not timed."""
    if op == "attention":
        return {}
    short = shape._replace(batch=1, time=2 * config.chunk_size + 17)
    arrays = ops.inputs(op, short, config.dtype)
    found: dict[str, float | str] = {}

    @functools.cache
    def outputs(name: str) -> np.ndarray:
        run = jax.jit(ops.forward(op, name, config.chunk_size))
        return np.asarray(run(*arrays.values()), np.float32)

    wanted = outputs("reference")
    functions: dict[str, Callable[[], np.ndarray]] = {
        name: lambda name=name: outputs(name) for name in runnable(op, short, config)
    }
    for name, peer in fla.peers(op, arrays).items():
        functions[name] = lambda run=peer["forward"]: run().float().cpu().numpy()
    for name, function in functions.items():
        try:
            y = function()
        except Exception as error:  # The others are to be timed all the same.
            found[name] = first_line(error)
            continue
        error = float(np.sqrt(np.mean((y - wanted) ** 2) / np.mean(wanted**2)))
        agrees = error <= AGREEMENT[config.dtype]
        found[name] = error if agrees else f"{error:.1e} from the token loop"
    return found


def first_line(error: Exception) -> str:
    """The kind of an error and the beginning of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def compiled_calls(
    op: str, shape: Shape, config: Config, agreed: Mapping[str, float | str]
) -> Calls:
    """The passes of those implementations that agree."""
    arrays = ops.inputs(op, shape, config.dtype)
    given = tuple(arrays.values())
    cotangent = jax.random.normal(jax.random.key(1), arrays["v"].shape)
    cotangent = cotangent.astype(arrays["v"].dtype)
    calls: Calls = {}

    def add(name: str, direction: str, run: Callable[..., Any], *given: Any) -> None:
        compiled = jax.jit(run).lower(*given).compile()
        calls[name, direction] = lambda: jax.block_until_ready(compiled(*given))

    for name in runnable(op, shape, config):
        if not isinstance(agreed.get(name), str):
            function = ops.forward(op, name, config.chunk_size)
            add(name, "forward", function, *given)
            add(name, "both", ops.with_gradients(function), cotangent, *given)
    for name, peer in fla.peers(op, arrays).items():
        if not isinstance(agreed.get(name), str):
            calls |= {(name, direction): run for direction, run in peer.items()}
    return calls


def measure(
    op: str, shape: Shape, config: Config, device: Device, calls: Calls
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for every implementation and pass, and one for each peer that failed."""
    about = {"op": op} | shape._asdict()
    rows, failed, runs = [], [], {}
    for (name, direction), call in calls.items():
        try:
            call()
        except Exception as error:
            if name in ops.IMPLEMENTATIONS:
                raise
            row = {"implementation": name, "pass": direction}
            failed.append(about | row | {"why": first_line(error)})
        else:
            runs[f"{name}/{direction}"] = call
    for label, found in time_functions(runs, config.repeats).items():
        name, direction = label.rsplit("/", 1)
        cost = ops.cost(op, shape, config.chunk_size, config.dtype, direction == "both")
        median = found["median_s"]
        rows.append(
            about
            | {"implementation": name, "pass": direction}
            | found
            | {
                "flops": cost.flops,
                "bytes": cost.bytes,
                "times_roofline": median / device.least_seconds(cost),
            }
        )
    return rows, failed


def main(config: Flags[Config]) -> int:
    """Checks, times, prints and writes the results after every shape; the exit code."""
    name, device = this_device()
    result: dict[str, Any] = {"peaks": {"of": name} | device._asdict()}
    result |= {"agreement": {}, "shapes": [], "failed": []}

    def agreed(op: str, shape: Shape) -> dict[str, float | str]:
        kind = f" of {shape.key_heads}" if shape.key_heads else ""
        key, known = f"{op} {shape.width}{kind}", result["agreement"]
        if key not in known:
            known[key] = agreement(op, shape, config)
            for name, why in known[key].items():
                if isinstance(why, str):
                    row = {"op": op, "implementation": name, "why": why}
                    result["failed"].append(row)
        return known[key]

    def time_all(shape: Shape) -> None:
        # Compiled side by side, before any is timed.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {
                op: pool.submit(compiled_calls, op, shape, config, agreed(op, shape))
                for op in config.ops
            }
        for op, calls in running.items():
            rows, failed = measure(op, shape, config, device, calls.result())
            result["shapes"] += rows
            result["failed"] += failed
            columns = ("median_s", "min_s", "max_s", "times_roofline")
            cells = (
                {"": f"{row['implementation']}, {row['pass']}"}
                | {column: f"{row[column]:.3g}" for column in columns}
                for row in rows
            )
            show(f"{op} {tuple(shape)}", cells)
        write_report(config.output, "speed of the ops", settings(config), result)

    for sizes in config.shapes:
        time_all(Shape(*sizes))
    for row in result["failed"]:
        print("not timed:", *(f"{k} {v}," for k, v in row.items()))
    ours = {row["implementation"] for row in result["failed"]}
    return int(bool(ours & {*ops.IMPLEMENTATIONS}))


if __name__ == "__main__":
    run(main)
