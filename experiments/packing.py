"""How many real tokens a second do packed rows train on, where documents are short?

    python -m experiments.packing

Pieces of the embedded documents stand for short documents: the logarithm of their
length is uniform from `shortest` to `longest`. They are read in rows of one context: as
chunks, which leave out what fills none; one a row, padded; and packed, several in a
row. Updates of all are timed in turn, each in a process of its own. A token counts
where it has a target. Results: `results/packing/packing.json`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
import tyro

from experiments.common.interleaved_timing import interleaved_timing
from experiments.lab.results import RESULTS, settings, show, write_report
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

Rows = Literal["chunked", "chunked, short", "one a row", "packed"]


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
        repeats: updates of each that are timed.
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
    output: Path = RESULTS / "packing" / "packing"

    def __post_init__(self):
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


def main(config: Config) -> None:
    """Times all rows of all models, and writes the result."""
    results, documents = {}, short_documents(config)
    for model in config.models:
        arguments = {name: (config, model, name) for name in get_args(Rows)}
        found = interleaved_timing(
            make_update, arguments, config.threads, config.repeats, "large"
        )
        results[model] = {
            name: {"read": _share_read(config, documents, name)}
            | _summary(config, found[name][1:])
            for name in get_args(Rows)
        }
        shown = ("read", "full", "tokens_per_s", "update_s")
        lines = {
            name: [row[column] for column in shown]
            for name, row in results[model].items()
        }
        show(model, shown, lines)
    question = "How many real tokens a second do packed rows of short documents give?"
    write_report(config.output, question, settings(config), {"models": results})


def make_update(config: Config, name: str, rows: Rows) -> Callable[[], int]:
    """An update that returns how many targets it had."""
    model = LanguageModel(preset(name, 4096), key=jax.random.key(0))
    batches = make_batches(config, name, rows)
    optimizer = optax.adamw(1e-4)
    step = jax.jit(make_train_step(model, optimizer, StepConfig()), donate_argnums=0)
    state = init_train_state(
        model, optimizer, StepConfig(), _rows_an_update(config, rows)
    )

    def update() -> int:
        nonlocal state
        batch = next(batches)
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return int(batch.mask.sum())

    return update


def make_batches(config: Config, name: str, rows: Rows) -> BatchIterator:
    """The batches of one kind of rows, of equally many places."""
    sizes = (_context(config, rows), _rows_an_update(config, rows), config.seed)
    given = (short_documents(config), *sizes)
    match rows:
        case "packed":
            mechanisms = preset(name, 4096).mechanisms
            return packed_batches(*given, start_multiple=start_multiple(mechanisms))
        case "one a row":
            return streamed_batches(*given)
        case _:
            return chunked_batches(*given)


def _context(config: Config, rows: Rows) -> int:
    return config.short_context if rows == "chunked, short" else config.context


def _rows_an_update(config: Config, rows: Rows) -> int:
    return config.tokens // _context(config, rows)


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


def _summary(config: Config, timed: list[tuple[float, Any, float]]) -> dict[str, Any]:
    seconds = np.array([line[0] for line in timed])
    targets = np.array([line[1] for line in timed])
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {
        "full": float(targets.mean() / config.tokens),
        "tokens_per_s": float(targets.mean() / median),
        "update_s": float(median),
        "quartiles_s": [float(low), float(high)],
    }


def _share_read(
    config: Config, documents: list[TokenisedDocument], rows: Rows
) -> float:
    """Of all targets those that an epoch has."""
    targets = np.array([len(d.tokens) - 1 for d in documents])
    if not rows.startswith("chunked"):
        return 1.0
    context = _context(config, rows)
    return float((targets // context * context).sum() / targets.sum())


if __name__ == "__main__":
    main(tyro.cli(Config))
