"""Cost of Elastic Memory in a training step, and of one layer against length.

    OPENBLAS_NUM_THREADS=1 python -m experiments.speed.train_step

step      a training step of models that differ in their mechanisms alone, as a ratio to
          the model without memory: sliding windows everywhere, and full attention
          everywhere, where replacing one layer saves time (table 8 of the paper);
length    one layer over T tokens, forward and backward, next to full attention: time,
          the compiler's peak of temporary memory, and bytes of the state.

All times are medians by interleaved timing.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jaxtyping import Array, PyTree

from experiments.lab.measure import tree_bytes
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import time_functions
from memjax.data import Batch
from memjax.models.language_model.presets import Size
from memjax.training import pretrain
from memjax.training.distributed import sharding


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result; the paper's proportions, a quarter the size.

    Attributes:
        model_dim: width; heads are 64 wide.
        layers: depth; one layer has the memory.
        window: tokens of a window and of a block.
        order: coefficients at 1x memory; the paper has 540 for blocks of 2048.
        context: tokens in a training step.
        lengths: tokens at which one layer is timed.
        longest_full: full attention is timed up to here.
        repeats: timings of each.
        output: where .json goes, without the ending.
    """

    model_dim: int = 256
    layers: int = 4
    window: int = 512
    order: int = 135
    context: int = 4096
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    longest_full: int = 8192
    repeats: int = 5
    output: Path = RESULTS / "speed" / "train_step"


def size(config: Config, capacity: int, **elastic: int) -> Size:
    """The sizes of mechanisms and models."""
    heads = config.model_dim // 64
    return Size(
        num_layers=config.layers,
        model_dim=config.model_dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        hidden_dim=3 * config.model_dim,
        window=config.window,
        capacity=capacity,
        options={"elastic_memory": {"order": config.order} | elastic},
        dtype="float32",
        remat=False,
    )


def steps(config: Config) -> dict[str, Any]:
    """Seconds of a training step by model, and ratios of throughput."""
    bank = {"bank_blocks": config.context // config.window}
    models: dict[str, tuple[str, str, dict[str, int]]] = {
        "sliding": ("sliding_window", "sliding_window", {}),
        "sliding+elastic": ("sliding_window", "elastic_memory", {}),
        "sliding+elastic, bank": ("sliding_window", "elastic_memory", bank),
        "sliding+elastic, 4x memory": (
            "sliding_window",
            "elastic_memory",
            {"order": 4 * config.order},
        ),
        "full": ("attention", "attention", {}),
        "full+elastic": ("attention", "elastic_memory", {}),
    }
    functions = {}
    for name, (most, last, elastic) in models.items():
        mechanisms = (most,) * (config.layers - 1) + (last,)
        sizes = size(config, config.context, **elastic)
        functions[name] = _step(config, sizes.model(*mechanisms, vocab_size=4096))
    found = time_functions(functions, config.repeats)
    for name, row in found.items():
        base = name.split("+")[0]
        row["throughput_ratio"] = found[base]["median_s"] / row["median_s"]
    return found


def _step(config: Config, model: Any) -> Callable[[], Any]:
    """A training step that carries its own state."""
    tokens = jnp.zeros((1, config.context), jnp.int32)
    mask = jnp.ones((1, config.context), jnp.float32)
    batch = Batch(tokens, tokens, mask, jnp.ones(1, bool))
    training = pretrain.RunConfig(model=model, data=pretrain.DataConfig(batch_size=1))
    state, step = pretrain.build_step(training, sharding.make_mesh(training.mesh))

    def advance() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return advance


def lengths(config: Config) -> list[dict[str, Any]]:
    """Seconds and bytes of one layer, forward and backward, against its length."""
    functions, rows = {}, {}
    for length in config.lengths:
        for name in ("elastic_memory", "attention"):
            if name == "attention" and length > config.longest_full:
                continue
            layer = size(config, length).mechanism(name).build()
            state = layer.init_state(1)
            arguments = (
                layer.init_params(jax.random.key(0)),
                state,
                jnp.ones((1, length, config.model_dim)),
            )

            def loss(params: PyTree, state: PyTree, x: Array, layer: Any = layer):
                return layer.apply(params, state, x)[1].sum()

            compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()

            def call(compiled: Any = compiled, arguments: Any = arguments) -> Any:
                return compiled(*arguments)

            analysis = compiled.memory_analysis()
            functions[f"{name} {length}"] = call
            rows[f"{name} {length}"] = {
                "mixer": name,
                "tokens": length,
                "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
                "state_bytes": tree_bytes(state),
            }
    found = time_functions(functions, config.repeats)
    return [rows[name] | found[name] for name in rows]


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    measured: dict[str, Any] = {"step": steps(config), "length": lengths(config)}
    columns = ("median_s", "min_s", "max_s")
    cells = {name: [row[c] for c in columns] for name, row in measured["step"].items()}
    cells |= {
        f"{row['mixer']}, {row['tokens']:,} tokens": [row[c] for c in columns]
        for row in measured["length"]
    }
    show("training step, and one layer", columns, cells)
    write_report(config.output, "cost of Elastic Memory", settings(config), measured)


@table("elastic/step", "speed/train_step")
def elastic_step(result: dict[str, Any]) -> Rows:
    """Seconds of a training step, and throughput against the baseline."""
    for name, row in result["step"].items():
        yield {
            "mechanisms": name,
            "seconds a step": number(row["median_s"], 2),
            "throughput against its baseline": times(row["throughput_ratio"]),
        }


@table("elastic/length", "speed/train_step")
def elastic_length(result: dict[str, Any]) -> Rows:
    """One layer over T tokens, forward and backward."""
    for row in result["length"]:
        yield {
            "one layer": row["mixer"].replace("_", " "),
            "tokens": number(row["tokens"], 0),
            "µs a token": number(1e6 * row["median_s"] / row["tokens"], 0),
            "temporary MiB": number((row["temporary_bytes"] or 0) / 2**20, 0),
            "state MiB": number(row["state_bytes"] / 2**20, 1),
        }


if __name__ == "__main__":
    main(tyro.cli(Config))
