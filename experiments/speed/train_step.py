"""Cost of Elastic Memory in a training step (table 8 of the paper).

    OPENBLAS_NUM_THREADS=1 python -m experiments.speed.train_step

A training step of models that differ in their mechanisms alone, as a ratio to the model
without memory: sliding windows everywhere, and full attention everywhere, where
replacing one layer saves time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import time_functions
from memjax.data import Batch
from memjax.models import ModelConfig
from memjax.models.language_model.presets import Size
from memjax.training import pretrain
from memjax.training.distributed import sharding


class Config(NamedTuple):
    """Sizes: the paper's proportions, a quarter of its size.

    Attributes:
        model_dim: width; heads are 64 wide.
        layers: depth; one layer has the memory.
        window: tokens of a window and of a block.
        order: coefficients at 1x memory; the paper has 540 for blocks of 2048.
        context: tokens in a training step.
        repeats: timings of each.
        output: where .json goes, without the ending.
    """

    model_dim: int = 256
    layers: int = 4
    window: int = 512
    order: int = 135
    context: int = 4096
    repeats: int = 5
    output: Path = RESULTS / "speed" / "train_step"


def models(config: Config) -> dict[str, ModelConfig]:
    """The compared models; those after a `+` have one layer of Elastic Memory."""
    heads = config.model_dim // 64

    def model(most: str, last: str, **elastic: int) -> ModelConfig:
        size = Size(
            num_layers=config.layers,
            model_dim=config.model_dim,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=64,
            hidden_dim=3 * config.model_dim,
            window=config.window,
            capacity=config.context,
            options={"elastic_memory": {"order": config.order} | elastic},
            dtype="float32",
            remat=False,
        )
        return size.model(*[most] * (config.layers - 1), last, vocab_size=4096)

    window, elastic = "sliding_window", "elastic_memory"
    bank = config.context // config.window
    return {
        "sliding": model(window, window),
        "sliding+elastic": model(window, elastic),
        "sliding+elastic, bank": model(window, elastic, bank_blocks=bank),
        "sliding+elastic, 4x memory": model(window, elastic, order=4 * config.order),
        "full": model("attention", "attention"),
        "full+elastic": model("attention", elastic),
    }


def training_step(config: Config, model: ModelConfig) -> Callable[[], Any]:
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


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    steps = {name: training_step(config, x) for name, x in models(config).items()}
    found = time_functions(steps, config.repeats)
    for name, row in found.items():
        base = name.split("+")[0]
        row["throughput_ratio"] = found[base]["median_s"] / row["median_s"]
    columns = ("median_s", "min_s", "max_s")
    cells = {name: [row[c] for c in columns] for name, row in found.items()}
    show("seconds of a training step", columns, cells)
    used = {k: v for k, v in config._asdict().items() if k != "output"}
    write_report(config.output, "cost of Elastic Memory", used, {"step": found})


@table("elastic/step", "speed/train_step")
def elastic_step(result: dict[str, Any]) -> Rows:
    """Seconds of a training step, and throughput against the baseline."""
    for name, row in result["step"].items():
        yield {
            "mechanisms": name,
            "seconds a step": number(row["median_s"], 2),
            "throughput against its baseline": times(row["throughput_ratio"]),
        }


if __name__ == "__main__":
    main(Config())
