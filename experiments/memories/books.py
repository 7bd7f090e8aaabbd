"""Does a memory lower perplexity beyond the window, on real documents?

    python -m experiments.memories.books
    python -m experiments.memories.books --window 64 --steps 2000 --run-dir runs/books64

Rows: three small models of equal parameters, trained on the same batches in the same
order: a Transformer++ with short sliding windows; one with windows of as many bytes as
the memory; Elastic Memory, which is the first with a compressed history in one of its
three layers; and an n-gram of the training documents. Columns: perplexity of held-out
documents, beyond the short window by kind; the loss difference of the memory. Its
paper's other memories, and LongPPL, are in `experiments.elastic.tables`.

It does not show what larger models do with a memory: on prose, the 3-gram is ahead of
the models with windows of 64.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab import measure, options, study
from experiments.lab.baselines import ORDER, NGram
from experiments.lab.intervals import (
    format_interval,
    loss_difference,
    mean_losses,
    select_kind,
)
from experiments.lab.results import Rows, figure, number, settings, table, write_report
from memjax import evaluation
from memjax.checks import check_sizes
from memjax.config_io import to_record
from memjax.data import TokenisedDocument, load_tokenizer, load_tokens
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import source_of
from memjax.evaluation.losses import cut_texts
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import TINY
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run

MEMORY = "Elastic Memory"
RESULTS = ("memories/books_window8", "memories/books_window64")
TOKENIZER = load_tokenizer("bpe4k")
#: Seconds of an update of 1,024 tokens, on two cores.
SECONDS_AN_UPDATE = 0.3


@dataclasses.dataclass(frozen=True)
class Config(options.Options):
    """Models, training and documents.

    Attributes:
        steps: of each model.
        source: of the documents, see `experiments.corpus.comparison`.
        seeds: of parameters and data order.
        window: tokens that attention sees, and block of the memory.
        context_length: tokens of a text, some windows; an update reads one.
        test_texts: held-out texts of each document that are scored.
        plan: print the missing runs, and stop.
        run_dir: of runs, results and plots.
    """

    steps: options.Count = 8000
    source: str = "folder:comparison"
    seeds: tuple[options.Seed, ...] = (42, 43)
    window: options.Tokens = 8
    context_length: options.Tokens = 1024
    test_texts: options.Count = 32
    plan: bool = False
    run_dir: options.Folder = Path("runs/books")

    def __post_init__(self):
        super().__post_init__()
        options.whole_windows("context_length", self.context_length, self.window)

    @property
    def edges(self) -> list[int]:
        """Of the bins of positions; the second is the window."""
        return evaluation.log2_bins(self.context_length, first=self.window)


def models(
    window: int, baselines: bool = False, times: int = 1
) -> dict[str, ModelConfig]:
    """The rows: windows, the shortest with no fewer bytes than the memory, the memory.

    A model has three layers; the memory is in the middle one. It has `times` the
    numbers of 1, and is read at as many times the points, as far back. `baselines` are
    the other memories of its paper's table 2.
    """
    check_sizes(times=times)
    read = dict(order=64 * times, memory_tokens=32 * times, decay=0.8 ** (1 / times))
    melodi, queue = {"memory_tokens": -(-32 * times // 3)}, {"queue": 64 * times}
    options = {"melodi": melodi, "memorizing": queue}

    def of(window: int, name: str = "sliding_window", **changed: Any) -> ModelConfig:
        own = {"elastic_memory": {"sampling": "exponential"} | read | changed}
        chosen = options | own
        size = dataclasses.replace(TINY, num_layers=3, window=window, options=chosen)
        build = size.model if name in ("infini", "melodi") else size.with_memory
        return build(name, vocab_size=TOKENIZER.vocab_size)

    memory = of(window, "elastic_memory")
    narrow, wider, size = map(state_bytes, (of(window), of(window + 1), memory))
    # Each token of a window takes as many bytes.
    wide = window + max(0, math.ceil((size - narrow) / (wider - narrow)))
    windows = {f"windows of {size}": of(size) for size in (window, wide)}
    others = {
        "Elastic Memory, uniform": of(window, "elastic_memory", sampling="uniform"),
        "Memorizing Transformer": of(window, "memorizing"),
        "Infini-attention": of(window, "infini"),
        "Melodi": of(window, "melodi"),
    }
    return windows | {MEMORY: memory} | (others if baselines else {})


def state_bytes(model: ModelConfig) -> int:
    """Bytes of a model's state of one text."""
    return measure.state_bytes(run.abstract_model(model))


def run_config(config: Config, model: ModelConfig, seed: int) -> run.RunConfig:
    """The run of one model."""
    return run.RunConfig(
        model=model,
        data=run.DataConfig(
            config.source, context_length=config.context_length, batch_size=1
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_ratio=0.05),
        loop=LoopConfig(steps=config.steps, save_every=200, log_every=50),
        seed=seed,
    )


def main(config: options.Flags[Config]) -> None:
    """Trains and scores the missing runs, writes and prints."""
    made = models(config.window)
    wanted = [*itertools.product(made, config.seeds)]
    # Before a plan too: it refuses what the run does.
    texts = test_texts(config)
    if config.plan:
        minutes = config.steps * SECONDS_AN_UPDATE / 60
        study.plan(wanted, config.run_dir, lambda _: minutes)
        return
    study.use_compile_cache(config.run_dir)

    def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
        model = trained(run_config(config, made[name], seed), folder)
        call = config.context_length
        losses = evaluation.token_losses(model, texts, tokens_per_call=call)
        return {
            "texts": measure.bin_losses(losses, config.edges),
            "parameters": measure.num_parameters(model),
            "state_bytes": state_bytes(made[name]),
        }

    def said(name: str, seed: int) -> list[Any]:
        return identity(config, made[name], seed)

    rows = study.run_all(wanted, measured, run_dir=config.run_dir, identity=said)
    found = report(config, rows)
    output = config.run_dir / "results"
    question = "does a memory help beyond the window?"
    result = write_report(output, question, settings(config), found)
    plot.draw(result, Path(f"{output}.png"))
    for name, row in result["models"].items():
        print(f"{name}: {row['perplexity']:.3f}")
    for base, kinds in result["gains"].items():
        print(f"over {base}:", {k: format_interval(x, 4) for k, x in kinds.items()})
    print(f"wrote {output}.json and .png")


def trained(settings: run.RunConfig, folder: Path) -> LanguageModel:
    """The model of a run's folder, which trains unless it has before."""
    study.train_once(folder, lambda: run.train(settings, folder))
    return run.load_model(folder)[1]


def identity(config: Config, model: ModelConfig, seed: int) -> list[Any]:
    """The settings that the numbers of a run depend on."""
    return [to_record(run_config(config, model, seed)), config.test_texts]


def test_texts(config: Config) -> list[TokenisedDocument]:
    """The first held-out texts of each document.

    Raises:
        ValueError: if the folder is missing, or no document is as long as a text.
    """
    options.require_corpus("source", config.source)
    longest = config.test_texts * config.context_length + 1
    documents = [
        document._replace(tokens=document.tokens[:longest])
        for document in load_tokens(config.source, TOKENIZER, "test")
    ]
    most = max((len(document.tokens) for document in documents), default=0)
    if most <= config.context_length:
        raise ValueError(
            f"context_length must be below the {most} tokens of the longest test "
            f"document of source={config.source!r}, got {config.context_length}"
        )
    return cut_texts(documents, config.context_length)


def report(config: Config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexities, loss differences and losses by position; means over seeds."""
    bins = len(config.edges) - 1
    binned: dict[str, list[TokenLosses]] = {}
    models: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["name"]
        binned.setdefault(name, []).append(
            measure.binned_losses(row["texts"], (0, bins))
        )
        models[name] = {key: row[key] for key in ("parameters", "state_bytes")}
    texts = test_texts(config)
    # The n-gram on the same texts, each counted from its own beginning.
    train = load_tokens(config.source, TOKENIZER, "train")
    ngram = NGram(train, ORDER, TOKENIZER.vocab_size).losses(texts)
    counted = measure.bin_losses(ngram, config.edges)
    means = {name: mean_losses(found) for name, found in binned.items()}
    means[f"{ORDER}-gram"] = measure.binned_losses(counted, (0, bins))
    kinds = sorted(set(means[MEMORY].kinds))
    for name, losses in means.items():
        models[name] = models.get(name, {}) | {
            "perplexity": evaluation.perplexity(losses),
            "beyond_window": evaluation.perplexity(losses, first=1),
            "beyond_window_by_kind": {
                kind: evaluation.perplexity(losses, kind=kind, first=1)
                for kind in kinds
            },
        }

    def beyond(losses: TokenLosses, kind: str) -> TokenLosses:
        """Losses beyond the short window, of one kind or of all."""
        late = losses._replace(nll=losses.nll[:, 1:], mask=losses.mask[:, 1:])
        return late if kind == "all" else select_kind(late, kind)

    def saved(base: str, kind: str) -> dict[str, Any]:
        """Loss difference of the memory, of the means over seeds and with each seed."""
        all_, *each = (
            loss_difference(beyond(one, kind), beyond(other, kind))
            for one, other in (
                (means[base], means[MEMORY]),
                *zip(binned[base], binned[MEMORY], strict=True),
            )
        )
        return all_ | {"by_seed": [found["nats"] for found in each]}

    gains = {
        name: {kind: saved(name, kind) for kind in ("all", *kinds)}
        for name in binned
        if name != MEMORY
    }
    by_position = {
        name: evaluation.loss_by_position(losses, range(bins + 1))
        for name, losses in means.items()
    }
    return {
        "steps": config.steps,
        "models": models,
        "gains": gains,
        "edges": config.edges,
        "nats_by_position": by_position,
    }


@figure("memories/books_window8")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Losses by position."""
    plots.loss_by_position(
        result["nats_by_position"],
        result["edges"],
        path,
        window=result["config"]["window"],
        title="Held-out documents: loss by position",
        source=source_of(result),
    )


@table("memories/books", *RESULTS)
def perplexities(*results: Mapping[str, Any]) -> Rows:
    """All models, with short windows and longer ones."""
    for result in results:
        window = result["config"]["window"]
        for model, row in result["models"].items():
            if "state_bytes" not in row and result is not results[0]:
                continue  # The n-gram is the same in both.
            name = f"{model}, blocks of {window}" if model == MEMORY else model
            steps = result["steps"] if "state_bytes" in row else None
            yield {
                "": name,
                "state size, bytes": number(row.get("state_bytes"), 0),
                "updates": number(steps, 0),
                "PPL": number(row["perplexity"], 1),
                "PPL beyond the short window": number(row["beyond_window"], 1),
            } | {k: number(x, 1) for k, x in row["beyond_window_by_kind"].items()}


@table("memories/books_gain", *RESULTS)
def differences(*results: Mapping[str, Any]) -> Rows:
    """Loss difference of the memory beyond the short window, from each window."""
    for result in results:
        for base, found in result["gains"].items():
            seeds = (f"{x:+.3f}" for x in found["all"]["by_seed"])
            yield (
                {"loss reduction by Elastic Memory, nats/token": f"over {base}"}
                | {kind: format_interval(x) for kind, x in found.items()}
                | {"all, with each seed": ", ".join(seeds)}
            )


if __name__ == "__main__":
    options.run(main)
