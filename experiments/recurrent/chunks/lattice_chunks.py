"""How far are Lattice's chunks from its exact recurrence, and what is exactness worth?

    OPENBLAS_NUM_THREADS=1 python -m experiments.recurrent.chunks.lattice_chunks

Three questions, each over the step size gamma, the chunk C and the variant:

- the chunk form takes gradients at the chunk's start: how far are its reads from those
  of the recurrence (C = 1)?
- refinement makes a chunk exact by rounds of better gates: how many, and how near?
- how long does each take, forward, against the scan over tokens? The same on any
  device that JAX runs on; times are medians over `repeats`, interleaved.

Queries and keys are softmax(2 x) of normal x, or normal x of unit norm, as in the
layer; values have a norm near 1; step sizes are uniform in [0, 2 gamma]. Errors are of
all reads, relative root mean square, in float32. One BLAS thread: with two, on a busy
machine, a triangular solve of 16 tokens took 50 ms instead of 0.05. A few minutes on
2 CPU cores.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.lab.results import RESULTS, figure, settings, write_report
from experiments.lab.timing import time_functions
from experiments.recurrent.chunks.lattice_refine import lattice_refined
from memjax.evaluation.drawing import drawing, source_of
from memjax_kernels import LATTICE_VARIANTS, LatticeVariant, lattice


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result."""

    gammas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """Mean step sizes."""
    chunk_sizes: tuple[int, ...] = (4, 16, 64)
    """Chunks."""
    time: int = 512
    """Tokens where errors are measured."""
    timed_time: int = 512
    """Tokens where times are measured."""
    timed_gammas: tuple[float, ...] = (0.03, 0.3)
    """Step sizes at which refinement is timed, with keys of unit norm."""
    batch: int = 1
    """Rows."""
    heads: int = 4
    """Heads of each row."""
    width: int = 64
    """Slots, and the width of each."""
    tolerance: float = 1e-6
    """At which refinement stops."""
    repeats: int = 5
    """Timings of each, at least 1."""
    output: pathlib.Path = RESULTS / "recurrent" / "lattice_chunks"
    """Where the numbers (.json) and the plot (.png) go."""

    def __post_init__(self) -> None:
        """Refuses values that measure nothing."""
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not (self.gammas and self.chunk_sizes and self.timed_gammas):
            raise ValueError("gammas, timed_gammas and chunk_sizes must not be empty")


def draw(config: Config, keys: str, length: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values, and step sizes of mean 1."""
    names = jax.random.split(jax.random.key(0), 4)
    shape = (config.batch, length, config.heads, config.width)
    q, k, v = (jax.random.normal(name, shape) for name in names[:3])
    if keys == "softmax":
        q, k = jax.nn.softmax(2 * q), jax.nn.softmax(2 * k)
    else:
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return (
        q,
        k,
        v / config.width**0.5,
        jax.random.uniform(names[3], shape[:3], maxval=2),
    )


def forms(config: Config, variant: LatticeVariant) -> dict[str, Any]:
    """The three ways, compiled at first use: by name and chunk."""

    def stale(size, q, k, v, gamma):
        options = {"variant": variant, "chunk_size": size, "implementation": "xla"}
        return lattice(q, k, v, gamma, **options)[1]

    def refined(size, q, k, v, gamma):
        options = {"chunk_size": size, "tolerance": config.tolerance}
        _, y, rounds = lattice_refined(q, k, v, gamma, variant=variant, **options)
        return y, rounds

    jit = lambda function, size: jax.jit(functools.partial(function, size))
    found = {"tokens": jit(stale, 1)}
    for size in config.chunk_sizes:
        found[f"chunks of {size}"] = jit(stale, size)
        found[f"refined {size}"] = jit(refined, size)
    return found


def errors(config: Config, keys: str, variant: str, ways: dict[str, Any]) -> list[dict]:
    """Errors of chunks, and of refinement with its rounds, over gamma and C."""
    *tokens, rates = draw(config, keys, config.time)
    rows = []
    for gamma in config.gammas:
        arguments = (*tokens, gamma * rates)
        exact = ways["tokens"](*arguments)
        for size in config.chunk_sizes:
            y, rounds = ways[f"refined {size}"](*arguments)
            rows.append(
                {
                    "keys": keys,
                    "variant": variant,
                    "gamma": gamma,
                    "chunk_size": size,
                    "chunk_error": distance(
                        ways[f"chunks of {size}"](*arguments), exact
                    ),
                    "refined_error": distance(y, exact),
                    "rounds_mean": float(jnp.mean(rounds)),
                    "rounds_max": int(jnp.max(rounds)),
                }
            )
    return rows


def times(config: Config, variant: str, ways: dict[str, Any]) -> list[dict]:
    """Seconds of each way, and how many times faster than the scan over tokens."""
    *tokens, rates = draw(config, "unit", config.timed_time)
    functions: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        # Only the time of refinement depends on the values.
        gammas = config.timed_gammas if "refined" in name else config.timed_gammas[:1]
        for gamma in gammas:
            label = f"{name}, gamma {gamma}" if "refined" in name else name
            arguments = (*tokens, gamma * rates)
            functions[label] = functools.partial(way, *arguments)
    for function in functions.values():
        jax.block_until_ready(function())
    taken = time_functions(functions, config.repeats)
    base = taken["tokens"]["median_s"]
    return [
        {"variant": variant, "form": name}
        | seconds
        | {"speedup": base / seconds["median_s"]}
        for name, seconds in taken.items()
    ]


def distance(actual: jax.Array, expected: jax.Array) -> float:
    """Relative root mean square."""
    squares = jnp.mean((actual - expected) ** 2) / jnp.mean(expected**2)
    return float(jnp.sqrt(squares))


# What a row of panels shows: its axis, keys, and lines as (field, dashes, name).
PANELS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = tuple(
    panel
    for keys in ("softmax", "unit")
    for panel in (
        (
            f"error, {keys} keys",
            keys,
            (("chunk_error", "-", "C = {}"), ("refined_error", ":", "C = {}, refined")),
        ),
        (f"rounds, {keys} keys", keys, (("rounds_mean", "-", "C = {}"),)),
    )
)


@figure("recurrent/lattice_chunks")
def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Errors and rounds against gamma: a column for each variant."""
    config = result["config"]
    gammas, sizes = config["gammas"], config["chunk_sizes"]
    with drawing(
        path,
        rows=len(PANELS),
        columns=len(LATTICE_VARIANTS),
        size=(11, 13),
        title="Lattice in chunks against its recurrence, by mean step size gamma",
        source=source_of(result),
        sharex=True,
        sharey="row",
    ) as drawn:
        for line, (label, keys, lines) in enumerate(PANELS):
            drawn.grid[line, 0].set_ylabel(label)
            for axes, variant in zip(drawn.grid[line], LATTICE_VARIANTS, strict=True):
                axes.set(xscale="log", yscale="log" if len(lines) > 1 else "linear")
                for i, size in enumerate(sizes):
                    wanted = (keys, variant, size)
                    found = [
                        row
                        for row in result["errors"]
                        if (row["keys"], row["variant"], row["chunk_size"]) == wanted
                    ]
                    for field, dashes, name in lines:
                        drawn.line(
                            axes,
                            gammas,
                            [row[field] for row in found],
                            name.format(size),
                            i,
                            named=variant == LATTICE_VARIANTS[-1],
                            linestyle=dashes,
                        )
        for axes, variant in zip(drawn.grid[0], LATTICE_VARIANTS, strict=True):
            axes.set_title(variant)
        for axes in drawn.grid[-1]:
            axes.set_xlabel("gamma")


def main(config: Config) -> None:
    """Measures, prints and writes the results."""
    rows, timings = [], []
    for variant in LATTICE_VARIANTS:
        ways = forms(config, variant)
        for keys in ("softmax", "unit"):
            rows += errors(config, keys, variant, ways)
        timings += times(config, variant, ways)
        _print(variant, rows, timings)
    question = "Lattice: chunks and refined chunks against the exact recurrence"
    results = {"errors": rows, "times": timings}
    result = write_report(config.output, question, settings(config), results)
    plot(result, pathlib.Path(f"{config.output}.png"))


def _print(variant: str, rows: list[dict], timings: list[dict]) -> None:
    print(f"\n{variant}: keys, gamma, C | error of chunks, of refinement | rounds")
    for row in rows:
        if row["variant"] == variant:
            print(
                f"  {row['keys']:7} {row['gamma']:5} {row['chunk_size']:3} | "
                f"{row['chunk_error']:.1e}  {row['refined_error']:.1e} | "
                f"{row['rounds_mean']:.1f}, at most {row['rounds_max']}"
            )
    for row in timings:
        if row["variant"] == variant:
            print(
                f"  {row['form']:24} {1e3 * row['median_s']:7.1f} ms "
                f"({1e3 * row['min_s']:.1f} to {1e3 * row['max_s']:.1f}), "
                f"{row['speedup']:.2f} times the speed of the token scan",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Config))
