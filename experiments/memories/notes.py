"""Does a memory hold notes where a window and a text of as many bytes have lost them?

    python -m experiments.memories.notes

A text of the embedded documents begins with notes: names and their numbers. It goes on
for up to 32,768 bytes, and then the names are asked for (`task.py`). Models
of equal parameters and equal state learn that on short texts of the training documents,
and are asked about texts of the test documents. Beside them stand what else keeps as
many bytes: a sliding window, which is trained alike; the text itself, which is read
again without a mistake; and the same text compressed.

Prints a table and answers, and writes results.json and a plot to `run_dir`. A model
that has its answers there is not trained again. What was measured is in
`experiments/results/notes/notes.json`.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments.lab.results import settings, write_report
from experiments.memories import mqar, notes_report, on_device, small_models
from experiments.memories import notes_task as notes
from experiments.memories.recall import MODELS
from experiments.memories.small_models import Scale
from memjax.checks import check_sizes, require_known
from memjax.models import LanguageModel, ModelConfig
from memjax.training.checkpoints.checksums import write_atomically

#: Attention over short texts first: longer ones from the start teach nothing.
STAGES = (mqar.SMALL.scale, Scale(2, 32, 2, 8, 1024, 6 * 1024, 600, 3e-3))
WARMUPS = (0.3, 0.1)
WINDOW = "sliding window"
#: What keeps a state of constant size.
MEMORIES = tuple(name for name in MODELS if name not in (WINDOW, "Transformer++"))


@dataclasses.dataclass(frozen=True)
class Config:
    """What changes the result.

    Attributes:
        models: memories, by their names in `recurrent.recall`; the window comes along.
        seeds: of parameters and training texts.
        updates: of both stages of the training.
        counts: notes of a text.
        distances: bytes of text between the notes and the questions, ascending.
        texts: of each of the test documents.
        run_dir: where answers, results and the plot go.
    """

    models: tuple[str, ...] = ("DeltaNet", "Trellis")
    seeds: tuple[int, ...] = (0,)
    updates: tuple[int, int] = (STAGES[0].steps, STAGES[1].steps)
    counts: tuple[int, ...] = (4, 16)
    distances: tuple[int, ...] = (64, 512, 2048, 8192, 16384, 32768)
    texts: int = 16
    run_dir: Path = Path("runs/notes")

    def __post_init__(self):
        check_sizes(texts=self.texts)
        for name in self.models:
            require_known("models", name, MEMORIES)
        for field, least in (("seeds", 0), ("updates", 1), ("distances", notes.PART)):
            if min(values := getattr(self, field), default=-1) < least:
                raise ValueError(f"{field} must be {least} or more, got {values}")
        if any(n % notes.PART for n in self.distances) or (
            sorted(set(self.distances)) != [*self.distances]
        ):
            raise ValueError(
                f"distances must ascend, each a multiple of {notes.PART}, "
                f"got {self.distances}"
            )
        if not self.counts or not all(1 <= n <= notes.PART // 2 for n in self.counts):
            raise ValueError(
                f"counts must lie in [1, {notes.PART // 2}], got {self.counts}"
            )


def main(config: Config) -> None:
    """Trains what is not trained yet, asks, reports."""
    began = time.monotonic()
    tests = {
        count: notes.draw_test(
            *("test", config.texts, count, config.distances[-1], mqar.TEST)
        )
        for count in config.counts
    }
    found = [
        notes_report.Answered(
            *(name, model),
            [_answers(config, name, model, seed, tests) for seed in config.seeds],
        )
        for name, model in models(config).items()
    ]
    question = "does a memory hold notes where as many bytes of anything else do not?"
    report = notes_report.report(found, tests, config.distances)
    report["minutes"] = (time.monotonic() - began) / 60
    result = write_report(
        config.run_dir / "results", question, settings(config), report
    )
    notes_report.plot(result, config.run_dir / "results.png")
    notes_report.show(result)
    print(f"\nwrote {config.run_dir}/results.json and .png")


def models(config: Config) -> dict[str, ModelConfig]:
    """The window and the memories, with equal parameters and equal states."""
    task = mqar.SMALL._replace(vocab_size=notes.VOCAB_SIZE)
    made = {name: mqar.model(task, MODELS[name]) for name in (WINDOW, *config.models)}
    return small_models.equal_parameters(made, task.scale)


def _answers(
    config: Config,
    name: str,
    model: ModelConfig,
    seed: int,
    tests: Mapping[int, notes.Test],
) -> dict[str, Any]:
    """What a model answers, by the notes of a text; kept in the run folder."""
    kept = ("updates", "counts", "distances", "texts")
    identity = {key: value for key, value in settings(config).items() if key in kept}
    file = config.run_dir / f"{name.replace(' ', '_')}-seed{seed}.json"
    if file.exists() and (found := json.loads(file.read_text()))["of"] == identity:
        return found
    print(f"{name}, seed {seed}", flush=True)
    trained, seconds = train(config, model, seed)
    answered = {
        str(n): answer(trained, x, config.distances).tolist() for n, x in tests.items()
    }
    found = {"of": identity, "seconds": seconds, "answers": answered}
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(found))
    return found


def train(config: Config, model: ModelConfig, seed: int) -> tuple[LanguageModel, float]:
    """A trained model and its seconds: short texts first, then longer ones."""
    trained, total = None, 0.0
    for scale, updates, warmup in zip(STAGES, config.updates, WARMUPS, strict=True):
        scale = scale._replace(steps=updates)
        run = small_models.run_config(scale, model, seed, warmup=warmup)
        trained, seconds = on_device.train(run, _drawing(scale), trained)
        total += seconds
    assert trained is not None  # There are two stages.
    return trained, total


@functools.lru_cache(maxsize=len(STAGES))
def _drawing(scale: Scale):
    """One function a stage, so that models share its text."""
    text, length = jnp.asarray(notes.text_of("train")), scale.context_length
    rows = scale.tokens_per_update // length

    def draw(seed, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return notes.training_batch(text, rows, mqar.SMALL.pairs, length, key)

    return draw


def answer(
    model: LanguageModel, test: notes.Test, distances: tuple[int, ...]
) -> np.ndarray:
    """The likeliest number of each note [distances, R, N], asked at each distance.

    The text is read once: questions are asked of the state there, which is kept.
    """
    graph, params = nnx.split(model)
    state = _read(graph, params, model.init_state(len(test.first)), test.first)
    found, read = [], 0
    for distance in distances:
        for start in range(read, distance, notes.PART):
            part = test.text[:, start : start + notes.PART]
            state = _read(graph, params, state, part)
        read = distance
        asked = test.notes.asked
        found.append(np.asarray(_ask(graph, params, state, test.questions, asked)))
    return np.stack(found)


@functools.partial(jax.jit, static_argnums=0)
def _read(graph, params, state, tokens):
    return nnx.merge(graph, params)(state, tokens)[0]


@functools.partial(jax.jit, static_argnums=0)
def _ask(graph, params, state, questions, asked):
    _, logits = nnx.merge(graph, params)(state, questions)
    likeliest = logits.argmax(axis=-1)
    return jnp.take_along_axis(likeliest, asked, axis=1) - notes.BYTES - notes.NAMES


if __name__ == "__main__":
    main(tyro.cli(Config))
