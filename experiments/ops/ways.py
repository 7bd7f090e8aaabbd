"""What the benchmark times: implementations that agree with the token loop."""

import concurrent.futures
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.lab.timing import time_functions
from experiments.ops import baselines, cases
from experiments.ops.cases import Shape
from experiments.ops.config import Config
from experiments.ops.cost import Device, roofline_seconds

# Relative RMS from the token loop, by dtype of the inputs.
AGREEMENT = {"float32": 1e-4, "bfloat16": 3e-2}


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


def check_all(
    ops: list[str], shape: Shape, config: Config
) -> dict[str, dict[str, float | str]]:
    """By op and implementation the error at a short odd length, or why it failed.

    Errors are relative RMS differences from the token loop; one that is too large is a
    failure too.
    """
    short = shape._replace(batch=1, time=2 * config.chunk_size + 17)
    tokens = [op for op in ops if op != "attention"]
    found = dict(side_by_side(lambda op: outputs(op, short, config), tokens))
    errors: dict[str, dict[str, float | str]] = {op: {} for op in ops}
    for op in tokens:
        # One after the other: Triton makes no promise about threads.
        found[op] |= baseline_outputs(op, short, config)
        wanted = found[op]["wanted"]
        if isinstance(wanted, str):
            raise SystemExit(f"the token loop of {op} does not run: {wanted}")
        for name, y in found[op].items():
            if isinstance(y, str):
                errors[op][name] = y
            elif name != "wanted":
                error = float(np.sqrt(np.mean((y - wanted) ** 2) / np.mean(wanted**2)))
                agrees = error <= AGREEMENT[str(config.dtype)]
                why = f"{error:.1e} from the token loop"
                errors[op][name] = error if agrees else why
    return errors


def outputs(op: str, shape: Shape, config: Config) -> dict[str, np.ndarray | str]:
    """Of every implementation, or why it failed; "wanted" is the token loop's."""
    arrays = cases.inputs(op, shape, str(config.dtype))
    found: dict[str, np.ndarray | str] = {}
    names = implementations(op, shape, config)
    for key, name in [("wanted", "reference"), *zip(names, names, strict=True)]:
        run = jax.jit(cases.forward(op, name, config.chunk_size))
        try:
            found[key] = np.asarray(run(*arrays.values()), np.float32)
        except Exception as error:  # The others are to be timed all the same.
            found[key] = first_line(error)
    return found


def baseline_outputs(op: str, shape: Shape, config: Config):
    """Of the baselines that compute the same, and why others failed."""
    found: dict[str, np.ndarray | str] = {}
    if op not in config.beside or not baselines.available():
        return found
    arrays = cases.inputs(op, shape, str(config.dtype))
    ways = baselines.ways(op, arrays, str(config.dtype), config.chunk_size)
    for name, (same, run, _) in ways.items():
        try:
            y = run().float().cpu().numpy()
        except Exception as error:  # Some versions refuse some devices.
            found[name] = first_line(error)
            continue
        if same:
            found[name] = y
    return found


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
    if op in config.beside and baselines.available():
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


def compile_all(
    cases: list[tuple[str, Shape]], config: Config, agreement: dict[str, dict]
) -> list[tuple[tuple[str, Shape], dict[tuple[str, str], Way]]]:
    """The ways of every case, compiled side by side, before any is timed."""

    def compiled(case):
        op, shape = case
        errors = agreement[f"{op} {shape.width}"]
        left_out = [name for name, error in errors.items() if isinstance(error, str)]
        return case, compiled_calls(op, shape, config, left_out)

    return [found for _, found in side_by_side(compiled, cases)]


def side_by_side(function: Callable[[Any], Any], inputs: list) -> list[tuple[Any, Any]]:
    """Inputs and results of a function that compiles, in threads."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(zip(inputs, pool.map(function, inputs), strict=True))
