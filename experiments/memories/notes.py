"""Does a memory hold notes where a window and a text of as many bytes have lost them?

    python -m experiments.memories.notes
    python -m experiments.memories.notes --plan

A text of the embedded documents begins with notes: names and their numbers. It goes on
for up to 32,768 bytes, and then the names are asked for (`notes_task`). Rows: memories
of equal parameters, and of equal states or equal width (`--equal width`), trained on
short texts of the training documents; Trellis and Gated DeltaNet also with gates that
hardly forget at the start, Trellis without them; baselines of as many bytes: a sliding
window, which is trained alike, the text itself, which is read again without a mistake,
and the same text compressed. Columns: seeds that learned the task, and what those
answer by notes of a text and bytes since, on the test documents. Writes results.json
and a plot to `run_dir`, below ten minutes with one seed, and prints the recorded range
of seeds beside it.

It does not show language: names and numbers have ids of their own, so that the models
are told what matters. A window of ids that are no bytes would hold all notes: the
baselines here are lower rivals.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments.lab import study
from experiments.lab.intervals import median_and_range
from experiments.lab.results import (
    Rows,
    figure,
    load,
    number,
    settings,
    show,
    table,
    write_report,
)
from experiments.memories import mqar, small_models
from experiments.memories import notes_task as notes
from experiments.memories.recall import MODELS, Column, Row
from experiments.memories.recall import model as model_of
from experiments.memories.small_models import Scale
from memjax.checks import require_known
from memjax.config_io import to_record
from memjax.evaluation.drawing import drawing, log_ticks, source_of
from memjax.evaluation.statistics import interval
from memjax.mechanisms.cells.base import CellConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.nnx.params import as_arrays, as_params

#: Attention over short texts first: longer ones from the start teach nothing.
STAGES = (mqar.SMALL.scale, Scale(2, 32, 2, 8, 1024, 6 * 1024, 600, 3e-3))
#: Minutes of one training, on two cores.
MINUTES = 2.5
WINDOW, TEXT = "sliding window", "text, read again"
COMPRESSED = "compressed text, read again"
#: Half-lives of forget gates before training, in tokens: the shortest is as long as a
#: training text. By default those of Trellis are 69 tokens.
HALF_LIVES = 1024.0, 32_768.0
#: Rows whose gates start there.
SLOW = {f"{name}, slow gates": name for name in ("Trellis, C = 4", "Gated DeltaNet")}
#: Rows with a state of constant size.
ROWS = MODELS | {
    **{slow: MODELS[name] for slow, name in SLOW.items()},
    "Trellis, C = 4, no gates": Row("trellis", {"chunk_size": 4, "forget": False}),
}
MEMORIES = tuple(name for name in ROWS if name not in (WINDOW, "Transformer++"))
#: Share of right answers, of the fewest notes at the first distance, of a model that
#: has learned the task.
LEARNED = 0.5


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, training and questions.

    Attributes:
        models: memories, of `ROWS`; the window is always a row.
        equal: what is equal: bytes of the state, or width of the memories.
        seeds: of parameters and training texts.
        updates: of both stages of the training.
        counts: notes of a text.
        distances: bytes of text between the notes and the questions, ascending.
        texts: of each of the test documents.
        plan: print the missing runs, and stop.
        run_dir: of answers, results and the plot.
    """

    models: tuple[str, ...] = ("DeltaNet", "Trellis, C = 4")
    equal: Column = "bytes"
    seeds: tuple[int, ...] = (0,)
    updates: tuple[int, int] = (STAGES[0].steps, STAGES[1].steps)
    counts: tuple[int, ...] = (4, 16)
    distances: tuple[int, ...] = (64, 512, 2048, 8192, 16384, 32768)
    texts: int = 16
    plan: bool = False
    run_dir: Path = Path("runs/notes")

    def __post_init__(self):
        for name in self.models:
            require_known("models", name, MEMORIES)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be distinct, at least one, got {self.seeds}")
        if any(n % notes.PART for n in self.distances) or (
            sorted(set(self.distances)) != [*self.distances]
        ):
            raise ValueError(
                f"distances must ascend, each a multiple of {notes.PART}, "
                f"got {self.distances}"
            )
        if not all(1 <= n <= notes.PART // 2 for n in self.counts):
            raise ValueError(
                f"counts must be in [1, {notes.PART // 2}], got {self.counts}"
            )


def main(config: Config) -> None:
    """Trains the missing rows, asks, writes and prints."""
    made = models(config)
    wanted = [*itertools.product(made, config.seeds)]
    if config.plan:
        study.plan(wanted, config.run_dir, lambda _: MINUTES)
        return
    began, longest = time.monotonic(), config.distances[-1]
    tests = {
        n: notes.draw_test("test", config.texts, n, longest, mqar.TEST)
        for n in config.counts
    }

    def measure(name: str, seed: int, folder: Path) -> dict[str, Any]:
        start = slow_gates(made[name], seed) if name in SLOW else None
        trained, seconds = train(config, made[name], seed, start)
        answers = {
            str(n): answer(trained, test, config.distances).tolist()
            for n, test in tests.items()
        }
        return {"seconds": seconds, "answers": answers}

    asked = [config.updates, config.counts, config.distances, config.texts]
    runs = study.run_all(
        wanted,
        measure,
        run_dir=config.run_dir,
        identity=lambda name, seed: [to_record(made[name]), *asked],
    )
    question = "does a memory hold notes where as many bytes of anything else do not?"
    results = report(made, runs, tests, config.distances)
    results["minutes"] = (time.monotonic() - began) / 60
    output = config.run_dir / "results"
    result = write_report(output, question, settings(config), results)
    plot.draw(result, Path(f"{output}.png"))
    show("Right answers by notes of a text and bytes since", right.rows(result))
    show("The same as recorded, with more seeds", right.rows(load("memories/notes")))
    print(f"wrote {output}.json and .png")


def models(config: Config) -> dict[str, ModelConfig]:
    """The window and the memories, with equal parameters."""
    task = mqar.SMALL._replace(vocab_size=notes.VOCAB_SIZE)

    def equal(name: str, column: Column) -> ModelConfig:
        made = model_of(task, ROWS[name], column)
        return small_models.equal_parameters(made, task.scale)

    memories = {name: equal(name, config.equal) for name in config.models}
    return {WINDOW: equal(WINDOW, "bytes")} | memories


def slow_gates(config: ModelConfig, seed: int) -> LanguageModel:
    """A model before training whose gates forget as slowly as `HALF_LIVES`."""
    model = LanguageModel(config, key=jax.random.key(seed))
    for mechanism, block in zip(config.layers, model.blocks, strict=True):
        assert isinstance(mechanism, CellConfig)
        params = as_arrays(block.mechanism)
        # These gates have biases, or rates: they need no constant weight.
        none = jnp.zeros(config.model_dim)
        cell = mechanism.with_half_lives(params.cell, HALF_LIVES, none)
        block.mechanism = nnx.data(as_params(params._replace(cell=cell)))
    return model


def train(
    config: Config, model: ModelConfig, seed: int, start: LanguageModel | None = None
) -> tuple[LanguageModel, float]:
    """A trained model and its CPU seconds: short texts first, then longer ones."""
    trained, total = start, 0.0
    for scale, updates in zip(STAGES, config.updates, strict=True):
        scale = scale._replace(steps=updates)
        draw = draw_batches(scale)
        trained, seconds = small_models.train(scale, model, seed, draw, trained)
        total += seconds
    assert trained is not None  # There are two stages.
    return trained, total


@functools.lru_cache(maxsize=len(STAGES))
def draw_batches(scale: Scale):
    """The function that draws a batch; one a stage, so that models share its text."""
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

    The text is read once: questions are asked of a copy of the state there.
    """
    graph, params = nnx.split(model)
    state = _read(graph, params, model.init_state(len(test.first)), test.first)
    found, read = [], 0
    for distance in distances:
        for start in range(read, distance, notes.PART):
            part = test.text[:, start : start + notes.PART]
            state = _read(graph, params, state, part)
        read, asked = distance, test.notes.asked
        found.append(np.asarray(_ask(graph, params, state, test.questions, asked)))
    return np.stack(found)


@functools.partial(jax.jit, static_argnums=0)
def _read(graph, params, state, tokens):
    return nnx.merge(graph, params)(state, tokens)[0]


@functools.partial(jax.jit, static_argnums=0)
def _ask(graph, params, state, questions, asked):
    _, logits = nnx.merge(graph, params)(state, questions)
    likeliest = logits.argmax(axis=-1)
    return jnp.take_along_axis(likeliest, asked, axis=1) - notes.FIRST_NUMBER


def report(
    made: Mapping[str, ModelConfig],
    runs: Sequence[Mapping[str, Any]],
    tests: Mapping[int, notes.Test],
    distances: Sequence[int],
) -> dict[str, Any]:
    """Scores of all: of each seed, and their mean with intervals over texts.

    `answers` of a run are [distances, R, N] by the notes of a text, as `tests` are.
    """
    # The largest of the states, in favour of the text.
    budget = max(map(small_models.state_bytes, made.values()))
    rows: dict[str, dict[str, Any]] = {}
    # Share of right answers [distances, R], mean over seeds and notes.
    shares: dict[str, dict[int, np.ndarray]] = {}
    for name, model in made.items():
        own = [run for run in runs if run["name"] == name]
        rows[name] = {
            "state_bytes": small_models.state_bytes(model),
            "parameters": small_models.parameters(model),
            "seconds": [run["seconds"] for run in own],
            "seeds": {},
        }
        shares[name] = {}
        for n, test in tests.items():
            numbers = np.asarray(test.notes.numbers) - notes.FIRST_NUMBER
            right = np.asarray([run["answers"][str(n)] for run in own]) == numbers
            rows[name]["seeds"][str(n)] = right.mean(axis=(2, 3)).tolist()
            shares[name][n] = right.mean(axis=(0, 3))
    for name, holds in (
        (TEXT, notes.fits_as_text),
        (COMPRESSED, notes.fits_as_compressed_text),
    ):
        rows[name], shares[name] = {"state_bytes": budget}, {}
        for n, test in tests.items():
            held = np.stack([holds(test, d, budget) for d in distances])
            # A reader who has lost a note guesses its number.
            shares[name][n] = np.where(held, 1, 1 / notes.NUMBERS).mean(axis=2)
    for name, row in rows.items():
        row["right"] = {
            str(n): [interval(texts)._asdict() for texts in share]
            for n, share in shares[name].items()
        }

    return {"models": rows}


def _of_seeds(row: Mapping[str, Any], count: int, i: int) -> list[float]:
    """Shares of right answers at a distance, of the seeds that learned the task."""
    first = next(iter(row["seeds"].values()))
    pairs = zip(first, row["seeds"][str(count)], strict=True)
    return [own[i] for fewest, own in pairs if fewest[0] >= LEARNED]


def _learned(row: Mapping[str, Any], count: int) -> str:
    return f"{len(_of_seeds(row, count, 0))} of {len(row['seconds'])}"


@table("memories/notes")
def right(result: Mapping[str, Any]) -> Rows:
    """Right answers by the notes of a text and the bytes since."""
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    # Up to there all of the text fits; the plot has every distance.
    chosen = [0, *(i for i, distance in enumerate(distances) if distance > 4096)]
    for name, row in result["models"].items():
        cells = {"": name, "state size, bytes": number(row["state_bytes"], 0)}
        cells["learned"] = _learned(row, counts[0]) if "seeds" in row else ""
        for n in counts:
            for i in dict.fromkeys(chosen):
                if "seeds" in row:
                    found = median_and_range(_of_seeds(row, n, i))
                else:
                    found = number(row["right"][str(n)][i]["mean"], 2)
                cells[f"{n} notes, {distances[i]:,} later"] = found
        yield cells
    yield "median (range) of the seeds that learned: half of the fewest notes, at once"


@figure("memories/notes")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Right answers against the text since the notes, one panel a count."""
    counts, distances = (result["config"][name] for name in ("counts", "distances"))
    size = (2.5 + 5.0 * len(counts), 4.8)
    with drawing(
        path, columns=len(counts), size=size, source=source_of(result)
    ) as drawn:
        for axes, count in zip(drawn.grid[0], counts, strict=True):
            last = count == counts[-1]
            for i, (name, row) in enumerate(result["models"].items()):
                low, means, high = np.transpose(
                    [
                        [x[k] for k in ("low", "mean", "high")]
                        for x in row["right"][str(count)]
                    ]
                )
                errors = np.maximum(0.0, [means - low, high - means])
                drawn.line(axes, distances, means, name, i, errors=errors, named=last)
            log_ticks(axes, distances)
            axes.set(title=f"{count} notes", xlabel="bytes of text since the notes")
        drawn.grid[0, 0].set_ylabel("right answers")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
