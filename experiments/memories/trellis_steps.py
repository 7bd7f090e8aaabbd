"""Which steps, chunks, φ and targets does Trellis learn with? (chooses the defaults)

    python -m experiments.memories.trellis_steps

Every row answers multi-query recall (`mqar`) and models the bytes of text. Both are
scored on validation data: no test sequence or document has a say in what becomes the
default. N-grams counted on the bytes that a run was trained on stand beside the
perplexities: models of this size lie above them, and rank steps, not architectures.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from experiments.lab.baselines import NGram
from experiments.lab.results import RESULTS
from experiments.memories import cases as study
from experiments.memories import mqar, seed_report
from experiments.memories import small_models as comparison
from experiments.memories.cases import Case
from memjax import evaluation
from memjax.data import TokenisedDocument, load_tokenizer, load_tokens
from memjax.training import pretrain as run
from memjax.training import run_data

ORDERS = (2, 3, 4)
BASE = "C = 64, at most 1/64, l2_silu"


def _row(
    chunk_size: int, step_size: float | None, phi: str, **others: Any
) -> tuple[str, dict]:
    options = {"chunk_size": chunk_size, "step_size": step_size, "phi": phi}
    return "trellis", options | others


#: The mechanism of each row, and its options. "bounded" is a `step_size` of None;
#: targets have a root mean square of 1 where they may not have any size.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeltaNet": ("deltanet", {}),
    BASE: _row(64, 1 / 64, "l2_silu"),
    "C = 64, at most 1, l2_silu": _row(64, 1.0, "l2_silu"),
    "C = 16, at most 1, l2_silu": _row(16, 1.0, "l2_silu"),
    "C = 4, at most 1, l2_silu": _row(4, 1.0, "l2_silu"),
    "C = 4, bounded, l2_silu": _row(4, None, "l2_silu"),
    "C = 16, bounded, l2_silu": _row(16, None, "l2_silu"),
    "C = 4, bounded, silu": _row(4, None, "silu"),
    "C = 16, bounded, silu": _row(16, None, "silu"),
    "C = 4, bounded, silu, targets of any size": _row(
        4, None, "silu", normalize_target=False
    ),
    "C = 16, bounded, silu, targets of any size": _row(
        16, None, "silu", normalize_target=False
    ),
}


@dataclasses.dataclass(frozen=True)
class Config(mqar.Config):
    """See `mqar.Config`.

    Attributes:
        tasks: what the rows learn.
        source: documents, as `memjax train` takes them.
        validation_tokens: bytes scored of each validation document.
    """

    tasks: tuple[Literal["recall", "text"], ...] = ("recall", "text")
    source: str = "embedded"
    validation_tokens: int = 16_384
    run_dir: Path = Path("runs/trellis_steps")
    output: Path = RESULTS / "memories" / "trellis_steps"

    def __post_init__(self):
        super().__post_init__()
        if self.validation_tokens < 1:
            raise ValueError(
                f"validation_tokens must be at least 1, got {self.validation_tokens}"
            )


def cases(config: Config) -> list[Case]:
    """Every row for both tasks, with equal parameters in each."""
    scale, vocab_size = config.scale, load_tokenizer("bytes").vocab_size
    recall = {
        name: mqar.model(config.task, mechanism, **options)
        for name, (mechanism, options) in ROWS.items()
    }
    text = {
        name: comparison.base_model(
            *(scale, vocab_size, mechanism, scale.context_length),
            implementation="reference",
            **options,
        )
        for name, (mechanism, options) in ROWS.items()
    }
    equal = {
        "recall": comparison.equal_parameters(recall, config.task.scale),
        "text": comparison.equal_parameters(text, scale),
    }
    return [
        Case(name, models[name], {"task": task})
        for name in ROWS
        for task, models in equal.items()
        if task in config.tasks
    ]


def settings(config: Config, case: Case, seed: int) -> run.RunConfig:
    """The run of one row."""
    if case.fields["task"] == "recall":
        return mqar.settings(config, case, seed)
    return comparison.run_config(
        *(config.scale, case.model, seed),
        source=config.source,
        tokenizer="bytes",
        warmup=config.warmup,
    )


def measure(
    config: Config, case: Case, settings: run.RunConfig, folder: Path
) -> dict[str, Any]:
    """Trains, then scores validation data."""
    if case.fields["task"] == "recall":
        return mqar.train(config, settings)[1]
    model, seconds = comparison.train(settings, _batches(settings), folder)
    length = settings.data.context_length
    losses = evaluation.token_losses(
        model,
        _validation(config),
        context_length=length,
        segment=length,
        batch_size=settings.data.batch_size,
    )
    return {"perplexity": evaluation.perplexity(losses), "seconds": seconds}


def ngrams(config: Config, settings: run.RunConfig) -> dict[str, float]:
    """Perplexity of n-grams counted on the bytes that a run was trained on."""
    data, length = _batches(settings), settings.data.context_length
    seen = []
    for _ in range(settings.loop.steps):
        batch = next(data)
        ends = np.asarray(batch.targets)[:, -1:]
        rows = np.concatenate([np.asarray(batch.tokens), ends], axis=1)
        seen += [TokenisedDocument("row", "text", row) for row in rows]
    scored = [
        document._replace(tokens=document.tokens[start : start + length + 1])
        for document in _validation(config)
        for start in range(0, len(document.tokens) - 1, length)
    ]
    model = NGram(seen, max(ORDERS), load_tokenizer("bytes").vocab_size)
    return {
        f"{order}-gram": evaluation.perplexity(model.losses(scored, order))
        for order in ORDERS
    }


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    everything = cases(config)
    text = [case for case in everything if case.fields["task"] == "text"]
    # The same bytes for all of them.
    counted = ngrams(config, settings(config, text[0], config.seeds[0])) if text else {}
    rows = study.run_all(
        *(config, everything),
        functools.partial(settings, config),
        functools.partial(measure, config),
        functools.partial(report, config, counted),
    )
    for title, summary in summaries(rows).items():
        seed_report.show(title, summary, BASE)


def summaries(rows: list[dict]) -> dict[str, list[dict]]:
    """Right answers, and perplexity per byte, of every row."""
    parts = {
        metric: [row for row in rows if metric in row]
        for metric in ("validation", "perplexity")
    }
    return {
        metric: seed_report.summarise(part, metric, BASE)
        for metric, part in parts.items()
        if part
    }


def report(config: Config, counted: Mapping[str, float], rows: list[dict]) -> None:
    """Writes what there is."""
    seed_report.write(
        config,
        "which steps, chunks, phi and targets does Trellis learn with?",
        rows,
        scale=config.scale._asdict(),
        task=config.task._asdict() | {"scale": config.task.scale._asdict()},
        ngrams=dict(counted),
        **summaries(rows),
    )


def _batches(settings: run.RunConfig):
    documents = run_data.load_split(settings, load_tokenizer("bytes"), "train")
    return run_data.batches(settings, [documents])


def _validation(config: Config) -> list[TokenisedDocument]:
    """The beginnings of the validation documents, in whole texts."""
    length = config.scale.context_length
    scored = config.validation_tokens // length * length + 1
    return [
        document._replace(tokens=np.asarray(document.tokens[:scored]))
        for document in load_tokens(
            config.source, load_tokenizer("bytes"), "validation"
        )
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
