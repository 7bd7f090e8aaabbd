"""What does Elastic Memory cost?

    OPENBLAS_NUM_THREADS=1 python -m experiments.elastic.cost

Three questions in one run, every time a median of `repeats` with the fastest and the
slowest, by interleaved timing:

bank      the closed form against the recurrence multiplied out, and the paper's whole
          1x bank (both from `experiments.elastic.hippo_bank`);
step      a training step of models that differ in their mechanisms alone, as a ratio to
          their memory-free baseline: sliding windows everywhere, and full attention
          everywhere, which is what replacing one layer speeds up (Table 8);
length    one layer over T tokens, forward and backward: time and the compiler's peak of
          temporary memory, beside full attention; and the state, which stays flat.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from experiments.elastic import hippo_bank
from experiments.lab.results import RESULTS, settings, write_report
from experiments.lab.timing import time_functions
from memjax.data import Batch
from memjax.models import ModelConfig
from memjax.models.language_model.presets import Size
from memjax.training import pretrain as run
from memjax.training.distributed import sharding

MECHANISMS: tuple[str, ...] = ("elastic_memory", "attention")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result; the paper's proportions, a quarter the size.

    Attributes:
        model_dim: width; heads are 64 wide.
        layers: depth; one layer carries the memory.
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
    output: pathlib.Path = RESULTS / "elastic" / "cost"


def size(config: Config, **elastic: int) -> Size:
    """The sizes of the benchmark's mechanisms and models."""
    heads = config.model_dim // 64
    return Size(
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


def model(config: Config, *mechanisms: str, **elastic: int) -> ModelConfig:
    """The model of the benchmark with the given mechanisms."""
    return size(config, **elastic).model(*mechanisms, vocab_size=4096)


def steps(config: Config) -> dict:
    """Seconds of a training step by model, and ratios of throughput."""
    windows: tuple[str, ...] = ("sliding_window",) * (config.layers - 1)
    full: tuple[str, ...] = ("attention",) * (config.layers - 1)
    bank = {"bank_blocks": config.context // config.window}
    models = {
        "sliding": model(config, *windows, "sliding_window"),
        "sliding+elastic": model(config, *windows, "elastic_memory"),
        "sliding+elastic, bank": model(config, *windows, "elastic_memory", **bank),
        "sliding+elastic, 4x memory": model(
            config,
            *windows,
            "elastic_memory",
            order=4 * config.order,
        ),
        "full": model(config, *full, "attention"),
        "full+elastic": model(config, *full, "elastic_memory"),
    }
    tokens = jnp.zeros((1, config.context), jnp.int32)
    mask = jnp.ones((1, config.context), jnp.float32)
    batch = Batch(tokens, tokens, mask, jnp.ones(1, bool))
    ways = {}
    for name, one in models.items():
        training = run.RunConfig(model=one, data=run.DataConfig(batch_size=1))
        mesh = sharding.make_mesh(training.mesh)
        ways[name] = _stepper(*run.build_step(training, mesh), batch)
        ways[name]()
    times = time_functions(ways, config.repeats)
    return {
        name: row
        | {
            "throughput_ratio": times[name.split("+")[0]]["median_s"] / row["median_s"],
            "baseline": name.split("+")[0],
        }
        for name, row in times.items()
    }


def lengths(config: Config) -> list[dict]:
    """Seconds and bytes of one layer, forward and backward, against its length."""
    ways, rows = {}, {}
    for length in config.lengths:
        for mechanism in MECHANISMS:
            if mechanism == "attention" and length > config.longest_full:
                continue
            sizes = dataclasses.replace(size(config), capacity=length)
            layer = sizes.mechanism(mechanism).build()
            params = layer.init_params(jax.random.key(0))
            state = layer.init_state(1)
            x = jnp.ones((1, length, config.model_dim))

            def loss(params, state, x, layer=layer):
                return layer.apply(params, state, x)[1].sum()

            compiled = jax.jit(jax.grad(loss)).lower(params, state, x).compile()
            name = f"{mechanism} {length}"
            ways[name] = lambda c=compiled, a=(params, state, x): jax.block_until_ready(
                c(*a)
            )
            ways[name]()
            analysis = compiled.memory_analysis()
            rows[name] = {
                "mixer": mechanism,
                "tokens": length,
                "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
                "state_bytes": sum(s.nbytes for s in jax.tree.leaves(state)),
            }
    times = time_functions(ways, config.repeats)
    return [rows[name] | times[name] for name in rows]


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    banks = hippo_bank.Config(repeats=config.repeats)
    whole = {"whole": lambda: hippo_bank.whole_bank(banks)}
    bank = hippo_bank.compare(banks) | time_functions(whole, config.repeats)
    measured = {"bank": bank, "step": steps(config), "length": lengths(config)}
    _print(measured)
    question = "cost of Elastic Memory"
    write_report(config.output, question, settings(config), measured)


def _stepper(state, step, batch):
    """A step that keeps its own state, which the update donates."""
    holder = [state]

    def advance():
        holder[0], metrics = step(holder[0], batch)
        jax.block_until_ready(metrics)

    return advance


def _print(measured: dict) -> None:
    console = Console()
    bank = measured["bank"]
    console.print(
        f"bank, N=128, L=512: {bank['speedup']:.0f} times faster than the recurrence; "
        f"N=540, 16 blocks of 2048: {bank['whole']['median_s']:.2f} s"
    )
    table = Table("training step", "seconds", "spread", "throughput", "against")
    for name, row in measured["step"].items():
        spread = f"{row['min_s']:.3f} to {row['max_s']:.3f}"
        ratio = f"{row['throughput_ratio']:.3f}"
        table.add_row(name, f"{row['median_s']:.3f}", spread, ratio, row["baseline"])
    console.print(table)
    table = Table("one layer", "tokens", "seconds", "µs a token", "temporary", "state")
    for row in measured["length"]:
        table.add_row(
            row["mixer"],
            f"{row['tokens']:,}",
            f"{row['median_s']:.3f}",
            f"{1e6 * row['median_s'] / row['tokens']:.1f}",
            f"{(row['temporary_bytes'] or 0) / 2**20:.0f} MiB",
            f"{row['state_bytes'] / 2**20:.1f} MiB",
        )
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
