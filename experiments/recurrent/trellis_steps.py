"""Which steps and chunks does Trellis learn text with? (chooses the default)

    python -m experiments.recurrent.trellis_steps

Language models of bytes, scored on validation documents: no test document has a say in
what becomes the default. `trellis_ablation` has the recall of the same rows. What is
trained on the same bytes but counts them, an n-gram, stands in the table: a model that
does not beat it says little about language.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.common.results import RESULTS
from experiments.recurrent import comparison, seed_report, study
from experiments.recurrent.ngram import NGram
from experiments.recurrent.study import Case
from memjax import evaluation
from memjax.data import load_tokenizer, load_tokens
from memjax.training import pretrain as run
from memjax.training import run_data

ORDERS = (2, 3, 4)
BASE = "C = 64, at most 1/64"


def steps(chunk_size: int, step_size: float, **options: Any) -> tuple[str, dict]:
    """A row of Trellis with chunks of this size and steps up to this one."""
    fixed = {"chunk_size": chunk_size, "step_size": step_size, "forget": True}
    return "trellis", fixed | options


#: The mixer of each row, and its options.
ROWS: dict[str, tuple[str, dict]] = {
    "DeltaNet": ("deltanet", {}),
    BASE: steps(64, 1 / 64),
    "C = 64, at most 1": steps(64, 1.0),
    "C = 16, at most 1/16": steps(16, 1 / 16),
    "C = 16, at most 1": steps(16, 1.0),
    "C = 4, at most 1": steps(4, 1.0),
    "C = 1, at most 1": steps(1, 1.0),
    "C = 1, at most 1, phi = silu": steps(1, 1.0, phi="silu"),
}


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`.

    Attributes:
        source: documents, as `memjax train` takes them.
        tokenizer: "bytes", "bpe4k", or a tokenizers JSON.
        validation_tokens: scored of each validation document.
    """

    seeds: tuple[int, ...] = (0, 1)
    source: str = "embedded"
    tokenizer: str = "bytes"
    validation_tokens: int = 16_384
    run_dir: Path = Path("runs/trellis_steps")
    output: Path = RESULTS / "recurrent" / "trellis_steps"

    def __post_init__(self):
        super().__post_init__()
        if self.validation_tokens < 1:
            raise ValueError(
                f"validation_tokens must be at least 1, got {self.validation_tokens}"
            )


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters."""
    scale = config.scale
    vocab_size = load_tokenizer(config.tokenizer).vocab_size
    length = scale.context_length
    models = {
        name: comparison.base_model(scale, vocab_size, mixer, length, **options)
        for name, (mixer, options) in ROWS.items()
    }
    equal = comparison.equal_parameters(models, scale)
    return [Case(name, model) for name, model in equal.items()]


def settings(config: Config, case: Case, seed: int) -> run.RunConfig:
    """One training on the documents."""
    return comparison.run_config(
        *(config.scale, case.model, seed),
        source=config.source,
        tokenizer=config.tokenizer,
    )


def measure(
    config: Config, case: Case, settings: run.RunConfig, folder: Path
) -> dict[str, Any]:
    """Trains, then scores the validation documents at the same context length."""
    tokenizer = load_tokenizer(config.tokenizer)
    data = run_data.batches(settings, run_data.load_split(settings, tokenizer, "train"))
    model, seconds = comparison.train(settings, data, folder)
    losses = evaluation.losses(
        model,
        _validation(config),
        context_length=settings.data.context_length,
        segment=settings.data.context_length,
        batch_size=settings.data.batch_size,
    )
    return {"perplexity": evaluation.perplexity(losses), "seconds": seconds}


def ngrams(config: Config, settings: run.RunConfig) -> dict[str, float]:
    """Perplexity of n-grams counted on the tokens that a run was trained on."""
    tokenizer = load_tokenizer(config.tokenizer)
    data = run_data.batches(settings, run_data.load_split(settings, tokenizer, "train"))
    seen = list(_texts(data, settings.loop.steps))
    length = settings.data.context_length
    scored = [
        document.tokens[start : start + length + 1].tolist()
        for document in _validation(config)
        for start in range(0, len(document.tokens) - 1, length)
    ]
    found = {}
    for order in ORDERS:
        model = NGram(order, tokenizer.vocab_size)
        model.count(seen)
        found[f"{order}-gram"] = model.perplexity(scored)
    return found


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    everything = cases(config)
    counted = ngrams(config, settings(config, everything[0], config.seeds[0]))
    rows = study.run_all(
        *(config, everything),
        functools.partial(settings, config),
        functools.partial(measure, config),
        functools.partial(report, config, counted),
    )
    summary = seed_report.summarise(rows, "perplexity", BASE)
    seed_report.show("Steps of Trellis, perplexity per byte", summary, BASE)


def report(config: Config, counted: Mapping[str, float], rows: list[dict]) -> None:
    """Writes what there is."""
    result = seed_report.write(
        config,
        "which steps and chunks does Trellis learn text with?",
        rows,
        scale=config.scale._asdict(),
        ngrams=dict(counted),
        perplexity=seed_report.summarise(rows, "perplexity", BASE),
    )
    plot(result, Path(f"{config.output}.png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the perplexities of a result."""
    seed_report.plot_means(result, path, "Steps of Trellis", "perplexity per byte")


def _validation(config: Config):
    length = config.scale.context_length
    tokenizer = load_tokenizer(config.tokenizer)
    return [
        d._replace(
            tokens=np.asarray(
                d.tokens[: config.validation_tokens // length * length + 1]
            )
        )
        for d in load_tokens(config.source, tokenizer, "validation")
    ]


def _texts(data: Iterator, steps: int) -> Iterator[list[int]]:
    """The texts of the first `steps` batches, with the last target of each."""
    for _ in range(steps):
        batch = next(data)
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            yield [*np.asarray(tokens).tolist(), int(targets[-1])]


if __name__ == "__main__":
    main(tyro.cli(Config))
