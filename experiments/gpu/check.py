"""Agreement of the GPU kernels with the token loop, on a real GPU.

    python -m experiments.gpu.check --jobs 8

Every Mosaic GPU kernel is compared with the token loop in float32 on the same bfloat16
inputs: outputs, memories and all gradients, as relative root mean squares. The shapes
are the benchmark's, scaled down, with open chunks and packed documents. Every case has
a process of its own, because a kernel that fails can take its process's GPU with it.
The exit code is 1 if a case disagrees or does not run, and 2 without a Hopper GPU.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import ops
from experiments.lab.ops import Shape
from experiments.lab.options import Count, Output, run
from experiments.lab.results import RESULTS, Rows, table, write_report
from experiments.speed.ops import first_line
from memjax.checks import require_known
from memjax_kernels import (
    LATTICE_VARIANTS,
    lattice,
    lattice_init_state,
    trellis,
    trellis_init_state,
)
from memjax_kernels._src.common import implementations

OUTPUT = RESULTS / "gpu" / "check"
# (8, 2048, 12, 64), (2, 16384, 16, 128) and (1, 65536, 12, 64) made short and narrow.
SHAPES = (Shape(4, 256, 12, 64), Shape(1, 1024, 2, 64))
# What is compared; of gradients the worst.
MEASURED = ("memory", "reads", "gradient")
#: A relative RMS difference that agrees; bfloat16 inputs and chunk memories cost 3e-3
#: to 1e-2.
TOLERANCE = 2e-2
#: After which a case is stopped, and cases at a time.
SECONDS, JOBS = 300, 4


class Case(NamedTuple):
    """A call of an op: (*tokens, state=, implementation=) -> (state, y)."""

    name: str
    tokens: tuple[Any, ...]
    state: Any
    call: Callable[..., Any]


def main(jobs: Count = JOBS, case: str = "", output: Output = OUTPUT) -> int:
    """Runs every case; the exit code.

    Args:
        jobs: cases at a time; most of a case is compiling.
        case: the name of one case, which is checked in this process; its row is printed
            as JSON and nothing is written. "" is all of them.
        output: where .json goes, without the ending.
    """
    if case and (jobs, output) != (JOBS, OUTPUT):
        raise ValueError(f"case={case!r} must be alone, got {jobs=}, output={output}")
    require_known("case", case, ["", *all_cases()])
    # Several processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    needs = implementations.needs("gpu")
    if needs:
        print(f"nothing was checked: {needs}", file=sys.stderr)
        return 2
    if case:
        row = measure(all_cases()[case]())
        # JSON has no NaN.
        print(json.dumps({k: v if v == v else None for k, v in row.items()}))
        return 0 if row["agrees"] else 1
    return 0 if all(row["agrees"] for row in check_all(jobs, output)) else 1


def check_all(jobs: int, output: Path) -> list[dict[str, Any]]:
    """The rows of all cases in their order, each printed and written at its turn."""
    rows: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(in_process, all_cases()):
            numbers = (f"{k} {row[k]:.1e}" for k in MEASURED if row[k] is not None)
            said = row["error"] or ("agrees" if row["agrees"] else "DISAGREES")
            print(f"{row['case']}: {said}", *numbers, f"{row['seconds']:.0f} s")
            rows.append(row)
            question = "Do the GPU kernels compute what the token loop does?"
            write_report(output, question, {"tolerance": TOLERANCE}, {"cases": rows})
    return rows


def in_process(name: str) -> dict[str, Any]:
    """The row of a case that is checked in a new process."""
    command = [sys.executable, "-m", "experiments.gpu.check", "--case", name]
    begin = time.perf_counter()
    row: dict[str, Any] = {"case": name, "agrees": False} | dict.fromkeys(MEASURED)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        row["error"] = f"stopped after {SECONDS} seconds"
    else:
        try:
            row |= json.loads(done.stdout.splitlines()[-1])
        # It ended before it could print its row.
        except (IndexError, json.JSONDecodeError):
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            row["error"] = f"ended with code {done.returncode}: {last}"
    return row | {"seconds": time.perf_counter() - begin}


def all_cases() -> dict[str, Callable[[], Case]]:
    """Every kernel, phi, activation and variant by name; both kinds of start."""
    found = {}

    def add(op, shape, chunk, **options):
        words = [op, tuple(shape), chunk, *options.values()]
        name = " ".join(map(str, words)).replace(", ", ",")
        found[name] = functools.partial(make_case, name, op, shape, chunk, **options)

    for shape in SHAPES:
        for chunk in (64, 16):
            for phi in ("l2_silu", "ln_silu", "silu", "identity", "softmax"):
                add("trellis", shape, chunk, phi=phi, activation="ln_silu")
        for chunk in (64, 16):
            for variant in LATTICE_VARIANTS:
                add("lattice", shape, chunk, variant=variant)
    for activation in ("l2_silu", "softmax"):
        add("trellis", SHAPES[0], 64, phi="l2_silu", activation=activation)
    return found


def make_case(name: str, op: str, shape: Shape, chunk: int, **options: Any) -> Case:
    """Both passes, from open chunks, over resets."""
    tokens = ops.inputs(op, shape, "bfloat16")
    b, t, h, d, *_ = shape
    # Batch elements at different positions of their chunks, one with a reset.
    position = jnp.arange(b, dtype=jnp.int32) * 5 % chunk
    starts = (jnp.arange(t)[None] + position[:, None]) % chunk == 0
    reset = starts & (jnp.arange(t)[None] // chunk == t // chunk // 2)
    if op == "trellis":
        function, empty = trellis, trellis_init_state(b, h, d, d, d, chunk)
    else:
        function, empty = lattice, lattice_init_state(b, h, d, d, chunk)
    state = dataclasses.replace(empty, position=position)

    def call(*tokens, state, **given):
        # Only the token loop has gradients for zeros behind the open tokens.
        open_tokens = jax.lax.stop_gradient(state.tokens)
        given |= {"state": dataclasses.replace(state, tokens=open_tokens)}
        return function(*tokens, chunk_size=chunk, reset=reset, **given, **options)

    return Case(name, tuple(tokens.values()), state, call)


def measure(case: Case) -> dict[str, Any]:
    """The kernels' distances from the token loop, or why they did not run.

    A case agrees where every array is within the tolerance, or no farther from the loop
    than twice what the XLA form is: bfloat16 tokens alone may move it farther.
    """
    row: dict[str, Any] = {"case": case.name, "error": "", "agrees": False}
    row |= dict.fromkeys(MEASURED, np.nan)
    exact = tuple(x.astype(jnp.float32) for x in case.tokens)
    expected = pull(case, "reference", exact)
    try:
        actual = jax.block_until_ready(pull(case, "pallas_gpu", case.tokens))
    except Exception as error:  # The other cases are to be seen all the same.
        return row | {"error": first_line(error)}
    of_xla = pull(case, "xla", case.tokens)
    agrees = True
    for name, kernel, xla, loop in zip(MEASURED, actual, of_xla, expected, strict=True):
        from_loop = functools.partial(jax.tree.map, distance)
        ours, theirs = (jax.tree.leaves(from_loop(x, loop)) for x in (kernel, xla))
        row |= {name: max(ours), f"xla_{name}": max(theirs)}
        pairs = zip(ours, theirs, strict=True)
        agrees &= all(x <= max(TOLERANCE, 2 * y) for x, y in pairs)
    return row | {"agrees": agrees}


def pull(case: Case, implementation: str, tokens):
    """Memory, reads, and gradients for random cotangents; compiled as one program."""

    def floats(tree):
        leaves = jax.tree.leaves(tree)
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    def forward(tokens, state):
        after, y = case.call(*tokens, state=state, implementation=implementation)
        return floats(after), y.astype(jnp.float32)

    @jax.jit
    def run(tokens, state):
        (after, y), back = jax.vjp(forward, tokens, state)
        normal = functools.partial(jax.random.normal, jax.random.key(1))
        weights = jax.tree.map(lambda x: normal(x.shape), (after, y))
        return after, y, floats(back(weights))

    return run(tokens, case.state)


def distance(actual, expected) -> float:
    """Relative root mean square; inf where something is not finite."""
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    apart = np.sqrt(np.mean((a - b) ** 2) / (np.mean(b**2) + 1e-12))
    return float(apart) if np.isfinite(apart) else float("inf")


@table("ops/check_gpu", "gpu/check", "gpu/check_second")
def check(first: dict[str, Any], second: dict[str, Any]) -> Rows:
    """The largest differences of each kernel from the token loop, by chunk size."""
    # Of a case that was checked twice, the second row.
    rows = {row["case"]: row for row in first["cases"] + second["cases"]}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        op, _, chunk, *_ = name.split()
        found.setdefault(f"{op}, chunks of {chunk}", []).append(row)
    for name, checked in found.items():
        yield {
            "kernel": name,
            "cases": str(len(checked)),
            f"within {second['config']['tolerance']}": str(
                sum(row["agrees"] for row in checked)
            ),
        } | {f"worst {k}": f"{max(r[k] for r in checked):.1e}" for k in MEASURED}


if __name__ == "__main__":
    run(main)
