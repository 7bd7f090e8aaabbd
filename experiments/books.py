"""Does a memory help beyond the window? Trains both models on real books and shows.

    python -m experiments.books

Transformer++ (sliding windows only) and Elastic Memory (the same model with one of its
layers reading a compressed history) have equal parameters, see the same batches in the
same order, and are scored on the same held-out documents. Writes a table, results.json,
a plot of loss by position, and a sample of text. Running it again goes on where it was
stopped; what was measured is in `experiments/results/books/window8.json`.

The window is 8 tokens because in the minutes that this program has a model learns to
use some 30 tokens of context and no more. With `--window 64 --steps 1000` Transformer++
has all the context that it can use and the memory hurts: 106.2 against 104.0
(`experiments/results/books/window64.json`).
"""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from experiments.common.gains import gain, restrict_kind, shown
from memjax import evaluation
from memjax.checks import check_positive, check_sizes
from memjax.data import load_tokenizer
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of
from memjax.evaluation.provenance import provenance
from memjax.models import Sampling, generate
from memjax.models.language_model.presets import TINY
from memjax.training import LoopConfig, OptimizerConfig, run_data, sharding
from memjax.training import pretrain as run
from memjax.training.checkpoints.checksums import write_atomically

MODELS = {"transformer": "Transformer++", "elastic": "Elastic Memory"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result.

    Attributes:
        minutes: budget for the whole program on this machine; sets the steps.
        steps: steps of each model; 0 is what the budget allows.
        window: tokens that attention sees, and block of the memory.
        context_length: tokens of a text.
        batch_size: texts in an update.
        test_texts: held-out texts of each document that are scored.
        sample_tokens: length of the sample.
        learning_rate: peak.
        seed: of parameters, data order and sample.
        run_dir: where runs, results and plots go.
    """

    minutes: float = 8.0
    steps: int = 0
    window: int = 8
    context_length: int = 1024
    batch_size: int = 1
    test_texts: int = 32
    sample_tokens: int = 120
    learning_rate: float = 3e-3
    seed: int = 42
    run_dir: Path = Path("runs/books")

    def __post_init__(self):
        check_positive(minutes=self.minutes)
        check_sizes(test_texts=self.test_texts)
        if self.context_length <= self.window:
            raise ValueError(
                f"context_length={self.context_length} must be above "
                f"window={self.window}: there is nothing beyond it to remember"
            )


def main(config: Config) -> None:
    """Trains, scores and reports."""
    began = time.monotonic()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # The runs compile what the timing compiled.
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = config.run_dir.resolve() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))
    steps = _plan(config, began)
    results = {}
    for family, name in MODELS.items():
        print(f"\n{name}: {steps} steps", flush=True)
        results[family] = _train_and_score(config, family, steps)
    report = _report(config, steps, results)
    report["minutes"] = (time.monotonic() - began) / 60
    write_atomically(config.run_dir / "results.json", json.dumps(report, indent=1))
    _show(report)
    print(f"\n{report['sample']}\n\nwrote {config.run_dir}/results.json and .png")


def run_config(config: Config, family: str, steps: int) -> run.RunConfig:
    """The run of one family; the two differ in the middle layer's mixer alone."""
    middle = "elastic_memory" if family == "elastic" else "sliding_window"
    read = dict(order=64, memory_tokens=32, sampling="exponential", decay=0.8)
    size = dataclasses.replace(
        TINY, num_layers=3, window=config.window, options={"elastic_memory": read}
    )
    model = size.model("sliding_window", middle, "sliding_window", vocab_size=4096)
    return run.RunConfig(
        model=model,
        data=run.DataConfig(
            context_length=config.context_length, batch_size=config.batch_size
        ),
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_ratio=0.05
        ),
        loop=LoopConfig(steps=steps, save_every=200, log_every=50),
        seed=config.seed,
    )


def _plan(config: Config, began: float) -> int:
    """Steps that fit the budget, kept for reruns of the same folder."""
    file = config.run_dir / "plan.json"
    if file.exists():
        return json.loads(file.read_text())["steps"]
    steps = config.steps
    if not steps:
        # Scoring costs about a third of a training step a batch; compiling again,
        # saving and sampling take about a minute.
        texts = config.test_texts * 4
        per_step = sum(_seconds(config, family) for family in MODELS)
        scoring = per_step * texts / config.batch_size / 3
        left = 60 * config.minutes - (time.monotonic() - began) - scoring - 60
        steps = max(20, int(left / per_step))
    write_atomically(file, json.dumps({"steps": steps}))
    return steps


def _seconds(config: Config, family: str) -> float:
    """Seconds of one update, median of five after compiling."""
    settings = run_config(config, family, steps=100)
    tokenizer = load_tokenizer(settings.data.tokenizer)
    documents = run_data.load_split(settings, tokenizer, "train")
    data = run_data.batches(settings, [documents])
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    times = []
    for _ in range(6):
        start = time.monotonic()
        state, metrics = step(state, next(data))
        jax.block_until_ready(metrics)
        times.append(time.monotonic() - start)
    return float(np.median(times[1:]))


def _train_and_score(config: Config, family: str, steps: int) -> dict:
    settings = run_config(config, family, steps)
    folder = config.run_dir / family
    start = time.monotonic()
    outcome = run.train(settings, folder)
    seconds = time.monotonic() - start
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    _, model = run.load_model(folder)
    tokenizer = load_tokenizer(settings.data.tokenizer)
    documents = [
        document._replace(
            tokens=document.tokens[: config.test_texts * config.context_length + 1]
        )
        for document in run_data.load_split(settings, tokenizer, "test")
    ]
    losses = evaluation.losses(
        model,
        documents,
        context_length=config.context_length,
        segment=config.context_length,
        batch_size=8,
    )
    params = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    state = jax.eval_shape(lambda: model.init_state(1))
    return {
        "losses": losses,
        "parameters": params,
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "seconds": seconds,
        "tokens_per_second": steps
        * config.batch_size
        * config.context_length
        / seconds,
        "sample": _sample(config, model, tokenizer, documents[0].tokens),
    }


def _sample(config, model, tokenizer, tokens) -> str:
    """Goes on from the opening of a held-out document, longer than the window."""
    prompt = np.asarray(tokens[: config.context_length // 2])[None]
    drawn = generate(
        model,
        None,
        prompt,
        config.sample_tokens,
        key=jax.random.key(config.seed),
        sampling=Sampling(temperature=0.8, top_p=0.95),
    ).tokens
    head, tail = tokenizer.decode(prompt[0, -60:]), tokenizer.decode(drawn[0])
    return f"...{head} >>> {tail}"


def _report(config: Config, steps: int, results: dict) -> dict:
    window = run_config(config, "elastic", steps).model.window
    edges = evaluation.octaves(config.context_length, first=window)
    models, curves = {}, {}
    for family, result in results.items():
        losses = result["losses"]
        kinds = dict.fromkeys(losses.kinds)
        curves[MODELS[family]] = evaluation.by_position(losses, edges)
        models[family] = {
            key: result[key]
            for key in ("parameters", "state_bytes", "seconds", "tokens_per_second")
        } | {
            "perplexity": evaluation.perplexity(losses),
            "beyond_window": evaluation.perplexity(losses, first=window),
            "beyond_window_by_kind": {
                kind: evaluation.perplexity(losses, kind=kind, first=window)
                for kind in kinds
            },
        }
    settings = dataclasses.asdict(config) | {"run_dir": None, "window": window}
    result = provenance("does a memory help beyond the window?", settings) | {
        "steps": steps,
        "models": models,
        "gain": _gain(results, window),
        "edges": edges,
        "nats_by_position": curves,
        "sample": results["elastic"]["sample"],
    }
    plot(result, config.run_dir / "results.png")
    return result


def plot(result: dict, path: Path) -> None:
    """Draws the losses of a result by position."""
    plots.loss_by_position(
        result["nats_by_position"],
        result["edges"],
        path,
        window=result["config"]["window"],
        title="Held-out documents: loss by position",
        source=source_of(result),
    )


def _gain(results: dict, window: int) -> dict:
    """Nats a token that the memory saves beyond the window, by kind of document."""
    base, memory = (results[family]["losses"] for family in MODELS)
    beyond = lambda x: x._replace(nll=x.nll[:, window:], mask=x.mask[:, window:])
    kinds = {"all": None} | {kind: kind for kind in sorted(set(base.kinds))}
    return {
        name: gain(*(beyond(restrict_kind(x, kind)) for x in (base, memory)))
        for name, kind in kinds.items()
    }


def _show(report: dict) -> None:
    console = Console()
    table = Table(title="Held-out documents")
    headings = ["model", "parameters", "state bytes", "tokens/s", "test PPL"]
    window = report["config"]["window"]
    for heading in [*headings, f"PPL beyond {window}"]:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for family, row in report["models"].items():
        table.add_row(
            MODELS[family],
            f"{row['parameters']:,}",
            f"{row['state_bytes']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['perplexity']:.2f}",
            f"{row['beyond_window']:.2f}",
        )
    console.print(table)
    kinds = Table(title=f"Beyond {window} tokens, by kind of text")
    for heading in ("text", *MODELS.values(), "nats saved [95%, by document]"):
        kinds.add_column(heading, justify="left" if heading == "text" else "right")
    for kind, found in report["gain"].items():
        values = [
            m["beyond_window"] if kind == "all" else m["beyond_window_by_kind"][kind]
            for m in report["models"].values()
        ]
        kinds.add_row(kind, *(f"{value:.2f}" for value in values), shown(found, 4))
    console.print(kinds)
    saved = report["gain"]["all"]["nats"]
    word = "helped" if saved > 0 else "hurt"
    console.print(
        f"Beyond the window the memory {word} in this run: one seed, "
        f"{report['gain']['all']['documents']} documents."
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
