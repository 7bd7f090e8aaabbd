"""Targets a second of packed rows, where documents are short.

    python -m experiments.speed.packing

Pieces of the embedded documents stand for short documents: the logarithm of their
length is uniform from `shortest` to `longest`. Rows of one context have them as chunks,
which leave out the remainder of each document; one a row, padded; and packed, several
in a row. Updates are timed interleaved, each kind of rows in a process of its own. A
token counts if it has a target.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    percent,
    settings,
    show,
    table,
    write_report,
)
from experiments.lab.timing import Round, time_processes
from memjax.checks import check_sizes
from memjax.data import (
    BatchIterator,
    TokenisedDocument,
    chunked_batches,
    load_tokenizer,
    load_tokens,
    packed_batches,
    streamed_batches,
)
from memjax.models import LanguageModel, preset
from memjax.models.language_model.inputs import start_multiple
from memjax.training.step import StepConfig, init_train_state, make_train_step

Kind = Literal["chunked", "chunked, short", "one a row", "packed"]
VOCABULARY = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        models: presets whose mechanisms take packed rows.
        context: T, tokens of a row.
        short_context: of the rows "chunked, short"; as many tokens an update.
        tokens: of an update.
        shortest: tokens of the shortest document.
        longest: of the longest.
        repeats: timed updates of each.
        threads: cores.
        seed: of lengths and order.
        output: of the result, without its ending.
    """

    models: tuple[str, ...] = ("transformer-tiny", "gated_deltanet-tiny")
    context: int = 1024
    short_context: int = 128
    tokens: int = 4096
    shortest: int = 33
    longest: int = 4097
    repeats: int = 10
    threads: int = 1
    seed: int = 0
    output: Path = RESULTS / "speed" / "packing"

    def __post_init__(self) -> None:
        check_sizes(context=self.context, repeats=self.repeats, threads=self.threads)
        if not 2 <= self.shortest <= self.longest:
            raise ValueError(
                "shortest must be at least 2 and at most "
                f"longest={self.longest}, got {self.shortest}"
            )
        for name in ("context", "short_context"):
            if self.tokens % getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} must divide tokens={self.tokens}"
                )

    def row(self, kind: Kind) -> int:
        """Tokens of a row."""
        return self.short_context if kind == "chunked, short" else self.context


def main(config: Config) -> None:
    """Times all rows of all models, and writes the result."""
    results, documents = {}, short_documents(config)
    for model in config.models:
        arguments = {kind: (config, model, kind) for kind in get_args(Kind)}
        found = time_processes(make_update, arguments, config.threads, config.repeats)
        results[model] = {
            kind: {"read": share_read(config, documents, kind)}
            | _summary(config, found[kind][1:])
            for kind in get_args(Kind)
        }
        columns = ("read", "full", "tokens_per_s", "update_s")
        rows = {k: [row[c] for c in columns] for k, row in results[model].items()}
        show(model, columns, rows)
    question = "How many real tokens a second do packed rows of short documents give?"
    write_report(config.output, question, settings(config), {"models": results})


def make_update(config: Config, name: str, kind: Kind) -> Callable[[], int]:
    """An update that returns its number of targets."""
    model = LanguageModel(preset(name, VOCABULARY), key=jax.random.key(0))
    batches = make_batches(config, name, kind)
    optimizer = optax.adamw(1e-4)
    step = jax.jit(make_train_step(model, optimizer, StepConfig()), donate_argnums=0)
    rows = config.tokens // config.row(kind)
    state = init_train_state(model, optimizer, StepConfig(), rows)

    def update() -> int:
        nonlocal state
        batch = next(batches)
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return int(batch.mask.sum())

    return update


def make_batches(config: Config, name: str, kind: Kind) -> BatchIterator:
    """The batches of one kind of rows, with equally many places."""
    documents, row = short_documents(config), config.row(kind)
    given = (documents, row, config.tokens // row, config.seed)
    match kind:
        case "packed":
            mechanisms = preset(name, VOCABULARY).mechanisms
            return packed_batches(*given, start_multiple=start_multiple(mechanisms))
        case "one a row":
            return streamed_batches(*given)
        case _:
            return chunked_batches(*given)


def short_documents(config: Config) -> list[TokenisedDocument]:
    """Pieces of the embedded training documents."""
    pieces, rng = [], np.random.default_rng(config.seed)
    for document in load_tokens("embedded", load_tokenizer("bpe4k"), "train"):
        at = 0
        while at < len(document.tokens):
            low, high = np.log(config.shortest), np.log(config.longest + 1)
            length = min(int(np.exp(rng.uniform(low, high))), config.longest)
            piece = np.asarray(document.tokens[at : at + length])
            pieces.append(document._replace(name=f"{document.name} {at}", tokens=piece))
            at += length
    return pieces


def share_read(config: Config, documents: list[TokenisedDocument], kind: Kind) -> float:
    """The share of all targets that an epoch reads."""
    if not kind.startswith("chunked"):
        return 1.0
    targets = np.array([len(d.tokens) - 1 for d in documents])
    row = config.row(kind)
    return float((targets // row * row).sum() / targets.sum())


def _summary(config: Config, rounds: list[Round]) -> dict[str, Any]:
    seconds = [found.seconds for found in rounds]
    targets = np.mean([found.value for found in rounds])
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {
        "full": float(targets / config.tokens),
        "tokens_per_s": float(targets / median),
        "update_s": float(median),
        "quartiles_s": [float(low), float(high)],
    }


@table("packing/packing", "speed/packing")
def packing(result: dict[str, Any]) -> Rows:
    """Targets a second of every kind of rows."""
    for model, found in result["models"].items():
        for name, row in found.items():
            low, high = row["quartiles_s"]
            yield {
                "mechanism": model.removesuffix("-tiny"),
                "rows": name,
                "an epoch reads": percent(row["read"]),
                "places with a target": percent(row["full"]),
                "targets a second": number(row["tokens_per_s"], 0),
                "s an update, quartiles": f"{low:.2f} to {high:.2f}",
            }


if __name__ == "__main__":
    main(tyro.cli(Config))
