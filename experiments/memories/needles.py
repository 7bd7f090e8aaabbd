"""Which memories find a needle in a haystack? (S-NIAH; Trellis, Table 3)

    python -m experiments.memories.needles --preset 125m

S-NIAH-PK, -N and -W (RULER): a sentence with a number or a UUID, hidden in noise or in
an essay, is queried at the end. The paper tests language models; here models are
trained on the tasks themselves, on short texts, and tested at 1, 2 and 4 times their
length on essays not seen before. An answer counts where greedy decoding gives it whole;
`tokens` says how many of its tokens are right, each given those before it. All models
have equal parameters and see equal examples in equal order.

No model that a CPU trains in minutes has found a needle: there are no results yet.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.lab.results import RESULTS
from experiments.memories import cases as study
from experiments.memories import seed_report
from experiments.memories import small_models as comparison
from experiments.memories.cases import Case
from experiments.memories.mqar import BASE, TEST, accuracy
from experiments.memories.recall import MODELS
from experiments.memories.small_models import Scale
from memjax.data import (
    NEEDLE_TASKS,
    Split,
    load_tokenizer,
    needle_batch,
    open_documents,
)
from memjax.data.batches.batch import Batch
from memjax.training import pretrain as run

#: Of the recurrent models, those in Trellis's Table 3, and Lattice.
NAMES = ("Transformer++", "TTT", "Mamba2", BASE, "Gated DeltaNet", "Trellis", "Lattice")
TIMES = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`.

    Attributes:
        source: documents whose prose the needles are hidden in.
        tokenizer: "bytes", "bpe4k", or a tokenizers JSON.
        test_rows: examples of each test.
    """

    source: str = "embedded"
    tokenizer: str = "bpe4k"
    test_rows: int = 48
    run_dir: Path = Path("runs/needles")
    output: Path = RESULTS / "memories" / "needles"

    def __post_init__(self):
        super().__post_init__()
        if self.test_rows < 1:
            raise ValueError(f"test_rows must be at least 1, got {self.test_rows}")

    @property
    def scale(self) -> Scale:
        """The preset, on sequences short enough to repeat."""
        scale = super().scale
        length = 256 if self.preset == "cpu" else 1024
        rows = max(len(NEEDLE_TASKS), scale.tokens_per_update // length // 3 * 3)
        return scale._replace(context_length=length, tokens_per_update=length * rows)


class Generated:
    """Batches made from their step: an iterator whose position is that step."""

    def __init__(self, make: Callable[[int], Batch]):
        self._make, self._step = make, 0

    def __next__(self) -> Batch:
        self._step += 1
        return self._make(self._step - 1)

    def get_state(self) -> dict[str, int]:
        """The step."""
        return {"step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a step."""
        self._step = state["step"]


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters."""
    scale = config.scale
    vocab_size = load_tokenizer(config.tokenizer).vocab_size
    length = scale.context_length
    models = {
        name: comparison.base_model(scale, vocab_size, MODELS[name], length)
        for name in NAMES
    }
    equal = comparison.equal_parameters(models, scale)
    return [Case(name, model) for name, model in equal.items()]


def settings(config: Config, case: Case, seed: int) -> run.RunConfig:
    """The run of one model; its sequences are made from the prose of `source`."""
    return comparison.run_config(
        *(config.scale, case.model, seed),
        source=config.source,
        tokenizer=config.tokenizer,
    )


def measure(
    config: Config, case: Case, settings: run.RunConfig, folder: Path
) -> dict[str, Any]:
    """Trains, then answers the tests."""
    data = Generated(functools.partial(_needles, config, settings.seed))
    model, seconds = comparison.train(settings, data, folder)
    scores = [fields | accuracy(model, tests) for fields, tests in _tests(config)]
    return {"scores": scores, "seconds": seconds}


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    rows = study.run_all(
        config,
        cases(config),
        functools.partial(settings, config),
        functools.partial(measure, config),
        functools.partial(report, config),
    )
    for title, summary in summaries(rows).items():
        seed_report.show(title, summary, BASE, columns=("length", "name"))


def summaries(rows: list[dict]) -> dict[str, list[dict]]:
    """Means of each test by the length of its texts."""
    flat = [
        {key: row[key] for key in ("name", "seed")} | score
        for row in rows
        for score in row["scores"]
    ]
    found = {}
    for task in NEEDLE_TASKS:
        part = [row for row in flat if row["task"] == task]
        found[task] = seed_report.summarise(part, "accuracy", BASE, "length")
        found[f"{task}, tokens"] = seed_report.summarise(part, "tokens", BASE, "length")
    return found


def report(config: Config, rows: list[dict]) -> None:
    """Writes what there is."""
    result = seed_report.write(
        config,
        "which memories find a needle in a haystack?",
        rows,
        scale=config.scale._asdict(),
        accuracy=summaries(rows),
    )
    plot(result, Path(f"{config.output}.png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws answers against the length of the texts."""
    labels = ("tokens of the test", "accuracy")
    seed_report.plot_lines(result, path, result["accuracy"], "length", labels)


# All models are trained on the same batches; those of three seeds fit.
@functools.lru_cache(maxsize=2048)
def _needles(config: Config, seed: int, step: int) -> Batch:
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
                    *([TEST, i, times, part], rows, task, length, tokenizer),
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
    main(tyro.cli(Config))
