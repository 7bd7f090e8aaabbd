"""Which memories find a needle in a haystack? (S-NIAH; Trellis, Table 3)

    python -m experiments.memories.needles --preset 125m

Rows: the models of the paper's table, and Lattice. Columns: whole answers to S-NIAH-PK,
-N and -W (RULER) at 1, 2 and 4 times the length of the training texts: a sentence with
a number or a UUID, hidden in noise or in an essay, is queried at the end. The paper
tests language models; here models are trained on the tasks themselves, and tested on
essays not seen before. `tokens` is the share of right tokens, each given those before.

There are no results yet: no model that a CPU trains in minutes has found a needle.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from flax import nnx

from experiments.lab import study
from experiments.lab.intervals import summarise_seeds
from experiments.lab.results import RESULTS, settings, write_report
from experiments.memories import small_models
from experiments.memories.mqar import BASE, TEST, accuracy
from experiments.memories.recall import MODELS
from experiments.memories.small_models import Scale
from memjax.checks import check_sizes
from memjax.config_io import to_record
from memjax.data import (
    NEEDLE_TASKS,
    Split,
    load_tokenizer,
    needle_batch,
    open_documents,
)
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.training import loop
from memjax.training import pretrain as run
from memjax.training.distributed import sharding

#: Of the recurrent models, those in Trellis's Table 3, and Lattice.
NAMES = ("Transformer++", "TTT", "Mamba2", BASE, "Gated DeltaNet", "Trellis", "Lattice")
#: Lengths of the tests over that of the training texts.
TIMES = (1, 2, 4)
#: Texts as long as models learn to copy in, as many of each task.
SCALES = {
    "cpu": Scale(2, 64, 2, 32, 256, 256 * 6, 200, 5e-3),
    "125m": Scale(12, 768, 12, 64, 1024, 1024 * 510, 4578, 3e-3),
}


@dataclasses.dataclass(frozen=True)
class Config(study.SeedsConfig):
    """See `study.SeedsConfig`.

    Attributes:
        preset: size of the models.
        steps: updates of each; 0 is the preset's.
        source: documents whose prose the needles are hidden in.
        tokenizer: "bytes", "bpe4k", or a tokenizers JSON.
        test_rows: examples of each test.
    """

    preset: Literal["cpu", "125m"] = "cpu"
    steps: int = 0
    source: str = "embedded"
    tokenizer: str = "bpe4k"
    test_rows: int = 48
    run_dir: Path = Path("runs/needles")
    output: Path = RESULTS / "memories" / "needles_from_scratch"

    def __post_init__(self):
        super().__post_init__()
        check_sizes(test_rows=self.test_rows)

    @property
    def scale(self) -> Scale:
        """The preset with the steps of the options."""
        scale = SCALES[self.preset]
        return scale._replace(steps=self.steps or scale.steps)


class Generated:
    """Training batches made from their step, which is the iterator's position."""

    def __init__(self, config: Config, seed: int):
        self._config, self._seed, self._step = config, seed, 0

    def __next__(self) -> Batch:
        self._step += 1
        return _batch(self._config, self._seed, self._step - 1)

    def get_state(self) -> dict[str, int]:
        """The step."""
        return {"step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a step."""
        self._step = state["step"]


def models(config: Config) -> dict[str, ModelConfig]:
    """The rows, with equal parameters."""
    scale, size = config.scale, load_tokenizer(config.tokenizer).vocab_size
    made = {
        name: small_models.base_model(scale, size, MODELS[name], scale.context_length)
        for name in NAMES
    }
    return small_models.equal_parameters(made, scale)


def main(config: Config) -> None:
    """Trains the missing rows, and writes the results."""
    made = models(config)
    names = study.selected(config.only, NAMES)
    if config.plan:
        study.plan(names, config.seeds, config.run_dir, lambda name: {})
        return

    def run_of(name: str, seed: int) -> run.RunConfig:
        return small_models.run_config(
            config.scale,
            made[name],
            seed,
            source=config.source,
            tokenizer=config.tokenizer,
        )

    def measure(name: str, seed: int, folder: Path) -> dict[str, Any]:
        began = time.monotonic()
        model = _train(config, run_of(name, seed), folder)
        scores = [fields | accuracy(model, tests) for fields, tests in _tests(config)]
        return {"scores": scores, "seconds": time.monotonic() - began}

    study.run_all(
        names,
        config.seeds,
        measure,
        run_dir=config.run_dir,
        identity=lambda name, seed: [to_record(run_of(name, seed)), config.test_rows],
        report=lambda rows: report(config, rows),
    )


def report(config: Config, rows: list[dict[str, Any]]) -> None:
    """Writes whole answers and right tokens of each task, by length of the text."""
    flat = [
        {key: row[key] for key in ("name", "seed")} | score
        for row in rows
        for score in row["scores"]
    ]
    found = {
        task + suffix: summarise_seeds(
            [row for row in flat if row["task"] == task], metric, BASE, "length"
        )
        for task in NEEDLE_TASKS
        for metric, suffix in (("accuracy", ""), ("tokens", ", tokens"))
    }
    question = "which memories find a needle in a haystack?"
    results = {"scale": config.scale._asdict(), "accuracy": found, "rows": rows}
    write_report(config.output, question, settings(config), results)


def _train(config: Config, settings: run.RunConfig, folder: Path) -> LanguageModel:
    """The trained model; continues from the checkpoints of the folder."""
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    state, outcome = loop.train(
        step,
        state,
        Generated(config, settings.seed),
        settings.loop,
        folder,
        config_record=to_record(settings),
        tokens_per_step=settings.data.batch_size * settings.data.context_length,
    )
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    return nnx.merge(small_models.structure(settings.model), state.params)


# All models are trained on the same batches; those of three seeds fit.
@functools.lru_cache(maxsize=2048)
def _batch(config: Config, seed: int, step: int) -> Batch:
    """As many sequences of each task, from the essays for training.

    All of the text counts, as for a language model: much of it repeats, and copying
    is learned from that long before it would be from the answers.
    """
    length = config.scale.context_length
    rows = config.scale.tokens_per_update // length // len(NEEDLE_TASKS)
    tokenizer, essay = load_tokenizer(config.tokenizer), _essay(config.source, "train")
    parts = [
        needle_batch([seed, step, i], rows, task, length, tokenizer, essay, "random")
        for i, task in enumerate(NEEDLE_TASKS.values())
    ]
    batch = Batch(*map(np.concatenate, zip(*parts, strict=True)))
    until_answer = np.maximum.accumulate(np.asarray(batch.mask)[:, ::-1], axis=1)
    return batch._replace(mask=until_answer[:, ::-1].copy())


@functools.lru_cache(maxsize=1)
def _tests(config: Config) -> list[tuple[dict, list[Batch]]]:
    """Each task at each length, a few sequences at a time, the same for all models."""
    tokenizer, essay = load_tokenizer(config.tokenizer), _essay(config.source, "test")
    tests = []
    for i, (name, task) in enumerate(NEEDLE_TASKS.items()):
        for times in TIMES:
            length = times * config.scale.context_length
            rows = min(config.test_rows, 16 // times)
            batches = [
                needle_batch(
                    [TEST, i, times, part],
                    rows,
                    task,
                    length,
                    tokenizer,
                    essay=essay,
                    start="random",
                )
                for part in range(-(-config.test_rows // rows))
            ]
            tests.append(({"task": name, "length": length}, batches))
    return tests


@functools.lru_cache(maxsize=2)
def _essay(source: str, split: Split) -> tuple[str, ...]:
    """The words of a split's prose, or of all its documents where none is prose."""
    documents = [d for d in open_documents(source) if d.split == split]
    prose = [d for d in documents if d.kind == "prose"] or documents
    return tuple(word for d in prose for word in d.text.split())


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
