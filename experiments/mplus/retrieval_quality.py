"""Does M+ retrieve the rows that hold a fact?

    python -m experiments.mplus.retrieval_quality
    python -m experiments.mplus.retrieval_quality --backbone tiny \\
        --chunk 1024 --after 3 8 16

A chunk with a fact's context is injected, then other chunks; after some of them the
fact's question is read. The rows that came from the context's chunk are counted: those
in the short-term pool, those in the long-term store, and those that the read retrieved
(M+, Figure 6). "at random" is the expected count when as many rows are drawn at random
from the store; "at best" is what a perfect retriever would take.

The chunk says more than the fact. So the rows of the one sentence that has the answer
are counted separately, as far as its tokens have rows of their own.

An untrained retriever finds no more than chance. Give a model of `memjax finetune` to
see what training brings.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.hmt import common
from experiments.lab.results import RESULTS, figure, settings, show, write_report
from experiments.mplus import models, retrieval
from experiments.mplus.recipe import recipe
from experiments.mplus.retention import config as retention_config
from experiments.mplus.retention.config import Preset, Scale
from experiments.mplus.samples import make_samples
from memjax.data import Tokenizer, load_tokenizer
from memjax.evaluation.drawing import drawing, source_of
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints.checkpoint import load_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.training.finetune.run import TOKENIZER_FILE, is_finetuned, later_stage
from memjax.training.run_folder import CHECKPOINTS

SCALES: dict[Preset, Scale] = {
    # At last the store holds some fifteen times what a read retrieves; the paper's
    # thirty are twice the tokens.
    "cpu": Scale(
        dataclasses.replace(retention_config.SCALES["cpu"].memory, store_size=8_192),
        12,
        (4, 8, 16, 32),
    ),
    "paper": Scale(MPlusConfig(), 100, (0, 10, 20, 40, 80, 160, 312)),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is tested, and how.

    Attributes:
        preset: "cpu" takes minutes on two cores; "paper" has the paper's sizes, 160k
            tokens after each of 100 facts.
        backbone: "tiny" is trained here in a minute or two, "smollm2" is the PyPI
            package's; or what `memjax finetune` takes as a backbone. M+ around it is
            untrained, with the preset's sizes.
        model: a trained M+, whose backbone counts then: the folder of a run, or of
            `memjax export`.
        store: memory tokens in the store; 0 keeps the model's number.
        retrieved: memory tokens that a read takes from it; 0 likewise.
        retriever: a file of `experiments.mplus.retriever`; none leaves the model's own.
        samples: facts to query, a multiple of `batch`; 0 is the preset's.
        batch: facts side by side.
        lengths: of questions: facts are those whose questions have one of the so many
            most frequent, as programs are compiled for each; 0 is all.
        after: query after these numbers of chunks, rising; none is the preset's.
        chunk: tokens of a chunk, a multiple of the memory's; contexts must fit: 1,024
            for the shorter tokens of the tiny backbone.
        facts: JSON lines with context, question, answer, kind and subject; none is
            those that ship, of the subjects that are not trained on.
        passages: JSON lines with text and subject, injected between a fact and its
            question; none is those that ship, followed by the embedded books.
        run_dir: where the tiny backbone is kept.
        seed: of the draws, and of an untrained M+.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    backbone: str = "smollm2"
    model: Path | None = None
    store: int = 0
    retrieved: int = 0
    retriever: Path | None = None
    samples: int = 0
    batch: int = 4
    lengths: int = 2
    after: tuple[int, ...] = ()
    chunk: int = 512
    facts: Path | None = None
    passages: Path | None = None
    run_dir: Path = Path("runs/hmt")
    seed: int = 0
    output: Path = RESULTS / "mplus" / "retrieval"

    def __post_init__(self):
        # What both programs take is refused alike.
        self.retention()

    def retention(self) -> retention_config.Config:
        """The settings that knowledge retention has as well."""
        names = {field.name for field in dataclasses.fields(retention_config.Config)}
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in names
        }
        return retention_config.Config(**shared)

    @property
    def scale(self) -> Scale:
        """The preset with the changes of the options."""
        scale = SCALES[self.preset]
        return Scale(
            scale.memory, self.samples or scale.samples, self.after or scale.after
        )


def main(config: Config) -> None:
    """Injects, queries and counts; prints, plots and writes the results."""
    model, tokenizer, trained = load(config)
    check(config, model)
    scale = config.scale
    shared = config.retention()
    model = models.with_options(shared, model)
    batches = make_samples(
        models.facts_of(shared),
        models.passages(shared),
        tokenizer,
        samples=scale.samples,
        batch=config.batch,
        num_chunks=scale.after[-1],
        chunk=config.chunk,
        lengths=config.lengths,
        seed=config.seed,
    )
    counted = [
        retrieval.inject_and_count(model, batch, scale.after) for batch in batches
    ]
    rows = {
        after: retrieval.summary(
            model.config, config.chunk, [found[after] for found in counted]
        )
        for after in scale.after
    }
    report(config, model, trained, rows)


def load(config: Config) -> tuple[MPlus, Tokenizer, bool]:
    """M+, its tokenizer, and whether it was trained.

    Raises:
        ValueError: if a folder holds no M+.
    """
    folder = config.model
    if folder is not None and not (
        (folder / CHECKPOINTS).is_dir() or later_stage(folder)
    ):
        return load_mplus(folder), load_tokenizer(str(folder / TOKENIZER_FILE)), True
    if folder is None and config.backbone == "tiny":
        hmt = common.Config(backbone="tiny", run_dir=config.run_dir)
        backbone, tokenizer = common.load_backbone(hmt)
        key = jax.random.key(config.seed)
        return add_mplus(backbone, config.scale.memory, key=key), tokenizer, False
    return models.load(config.retention())


def check(config: Config, model: MPlus) -> None:
    """Raises ValueError if memory tokens of a chunk could not be identified."""
    memory = model.config
    if not memory.has_retriever or memory.legacy:
        raise ValueError(
            "model must be an M+ with a retriever and a clock of memory tokens, got "
            f"num_retrieved={memory.num_retrieved}, retrieval={memory.retrieval!r}, "
            f"legacy={memory.legacy}"
        )
    if config.chunk % memory.chunk_size:
        raise ValueError(
            f"chunk must be a multiple of the memory's {memory.chunk_size}, so that "
            f"the context has memory tokens of its own, got {config.chunk}"
        )


def report(
    config: Config, model: MPlus, trained: bool, rows: Mapping[int, dict[str, Any]]
) -> None:
    """Writes, draws and prints."""
    distances = [count * config.chunk for count in rows]
    question = "does M+ retrieve the rows that hold a fact?"
    folder = config.model
    # A folder that was exported says no more how it was trained.
    is_run = folder is not None and is_finetuned(folder)
    results = {
        "trained": trained,
        "recipe": recipe(folder) if folder is not None and is_run else None,
        "memory": dataclasses.asdict(model.config),
        "distances": distances,
        "after": rows,
    }
    result = write_report(config.output, question, settings(config), results)
    plot(result, Path(f"{config.output}.png"))
    title = _title(result)
    columns = {
        "in the pool": "rows_in_pool",
        "in the store": "rows_in_store",
        "retrieved": "rows_retrieved",
        "at random": "rows_at_random",
        "at best": "rows_at_best",
        "share retrieved": "share",
        "share at random": "share_random",
        "times random": "times_random",
        "in pool or store": "still_known",
    }
    show(
        f"{title}, after so many tokens",
        [f"{distance:,}" for distance in distances],
        {
            name: [row[column] for row in rows.values()]
            for name, column in columns.items()
        }
        | {
            f"answer's sentence: {name}": [row["answer"][f] for row in rows.values()]
            for name, f in list(columns.items())[1:3] + list(columns.items())[5:8]
        },
    )


def _title(result: Mapping[str, Any]) -> str:
    note = "" if result["trained"] else ", untrained retriever"
    made = next(iter(result["after"].values()))["rows_made"]
    return f"Rows of a fact's context, of {made} a layer{note}"


@figure("mplus/retrieval", "mplus/retrieval_fitted")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Figure 6: memory tokens, and below them shares of those in the store."""
    rows, distances = list(result["after"].values()), result["distances"]
    of = lambda name, found=rows: [row[name] for row in found]
    answers = of("answer")
    with drawing(
        path,
        rows=2,
        size=(8, 7),
        title=_title(result),
        source=source_of(result),
        sharex=True,
    ) as drawn:
        top, bottom = drawn.grid[:, 0]
        for i, name in enumerate(("in the pool", "in the store", "retrieved")):
            values = of(f"rows_{name.replace('the ', '').replace(' ', '_')}")
            drawn.line(top, distances, values, name, i)
        drawn.line(top, distances, of("rows_at_random"), "at random", 3)
        for i, found, name in (
            (2, rows, "retrieved"),
            (4, answers, "retrieved of the\nanswer's sentence"),
        ):
            errors = 1.96 * np.asarray(of("standard_error", found))
            drawn.line(bottom, distances, of("share", found), name, i, errors=errors)
        drawn.line(bottom, distances, of("share_random"), "at random", 3)
        drawn.line(bottom, distances, of("share_best"), "at best", 6)
        top.set(ylabel="rows a layer")
        bottom.set(xlabel="tokens injected since", ylabel="share of those in the store")
        bottom.set_xticks(distances, [f"{distance:,}" for distance in distances])
        bottom.set_ylim(-0.03, 1.05)


if __name__ == "__main__":
    main(tyro.cli(Config))
