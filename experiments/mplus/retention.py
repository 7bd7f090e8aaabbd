"""Knowledge retention: facts that are answered after more and more injected text.

    python -m experiments.mplus.retention

Question: which facts of the CIA World Factbook does a model still answer that were
injected, inside their context, many tokens ago? (M+, Figures 3, 5, 8 and 9; the authors
have SQuAD and NaturalQA.)
Rows: M+ with its retriever, with a retriever fitted afterwards, and with attention;
MemoryLLM; the backbone with full attention, windows, re-read text, SnapKV, BM25, and
the question alone, as it came and with adapters trained on M+'s tasks (`adapters.py`).
Columns: share of right answers by distance in tokens; size of the state; M+'s share
minus the row's, paired by fact. An answer is right if it occurs in ten tokens of greedy
decoding. The other text names neither answer nor country. Facts that the backbone
answers closed book are left out.
Not shown: other facts than those of templates; trainings longer than 240 updates.

Answers are stored in the result file, a batch of facts at a time: a call that was
stopped is repeated and continues, and one with `--only` leaves the other rows there.
"""

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import tyro

from experiments.lab import backbones
from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    number,
    settings,
    table,
    write_report,
)
from experiments.lab.study import selected, train_once
from experiments.mplus import adapters, models
from experiments.mplus.answers import (
    FITTED,
    TUNED,
    accuracy,
    by_method,
    query_batches,
    right,
)
from experiments.mplus.methods import (
    Baseline,
    LatentMemory,
    Memory,
    Method,
    baseline,
    sizes_for,
)
from experiments.mplus.samples import choose_facts, in_rounds, make_samples
from memjax.data import Question
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of
from memjax.evaluation.provenance import device_name, version
from memjax.models.mplus.build import add_mplus
from memjax.status import say
from memjax.training.finetune import finetune

QUESTION = "what does a model still know that was injected many tokens ago?"
#: Rows by name: those with a trained memory, those of the backbone, and those tuned.
MEMORIES = (*get_args(Memory), f"M+, {FITTED}")
ROWS = (
    *MEMORIES,
    *get_args(Baseline),
    *(f"{name}, {TUNED}" for name in get_args(Baseline)),
)
#: The lines of the plot.
PLOTTED = (
    "M+",
    f"M+, {FITTED}",
    "MemoryLLM",
    f"window, device, {TUNED}",
    f"window, all, {TUNED}",
    f"BM25, {TUNED}",
)
#: Of the adapters the lower of two learning rates, 3e-4 and 1e-3, either of which
#: answers all 24 validation facts (`results/mplus/validation`).
UPDATES, RATE = 240, 3e-4
#: Facts, which are queried after these numbers of chunks.
SAMPLES, AFTER = 96, (0, 4, 8, 16)
#: Facts side by side, and lengths of questions that are drawn.
BATCH, LENGTHS = 4, 4
#: Tokens of a chunk, into which contexts must fit, and of an answer.
CHUNK, ANSWER = 512, 10


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; a row takes about an hour on a core, a training 40 minutes.

    Attributes:
        only: names of rows; none is all.
        seeds: of the trainings.
        until: ask only the first facts, a multiple of four; 0 is all.
        run_dir: where models are stored.
        output: where .json and .png go, without the ending.
    """

    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (42, 43)
    until: int = 0
    run_dir: Path = Path("runs/retention")
    output: Path = RESULTS / "mplus" / "retention"


def main(config: Config) -> None:
    """Asks every row what the file has no answer to; prints, draws and writes."""
    study = Study(config)
    for name in selected(config.only, ROWS):
        is_trained = name in MEMORIES or name.endswith(TUNED)
        for seed in config.seeds if is_trained else (None,):
            study.ask(name, seed)
            jax.clear_caches()
    plot(study.result, Path(f"{config.output}.png"))


class Study:
    """The models, the facts and the result file of a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.path = backbones.smollm2()
        found = finetune.load_backbone(self.path)
        self.backbone, self.tokenizer = found.model, found.tokenizer
        facts = models.load_facts()
        prompts = (self.tokenizer.encode(f"\n\n{fact.question}") for fact in facts)
        self.sizes = sizes_for(
            add_mplus(self.backbone, models.stage(3).memory, key=jax.random.key(0)),
            chunk=CHUNK,
            question=max(map(len, prompts)) + ANSWER,
            longest=(AFTER[-1] + 1) * CHUNK,
        )
        file = Path(f"{config.output}.json")
        if file.is_file():
            self.result = json.loads(file.read_text("utf-8"))
        else:
            asked = choose_facts(
                in_rounds(facts),
                self.tokenizer,
                samples=SAMPLES,
                batch=BATCH,
                lengths=LENGTHS,
                answer_closed_book=self.answer_closed_book,
            )
            self.result = {
                "facts": [fact._asdict() for fact in asked],
                "distances": [count * CHUNK for count in AFTER],
                "rows": {},
            }
        self.batches = make_samples(
            [Question(**fact) for fact in self.result["facts"]],
            models.passages(),
            self.tokenizer,
            batch=BATCH,
            num_chunks=AFTER[-1],
            chunk=CHUNK,
        )

    def answer_closed_book(self, prompts: np.ndarray) -> list[str]:
        """The backbone's answers to the questions alone."""
        _, alone = baseline("closed book", self.backbone, self.tokenizer, self.sizes)
        found = alone.query(alone.start(len(prompts)), prompts, ANSWER)
        assert found is not None
        return [self.tokenizer.decode(tokens) for tokens in found]

    def ask(self, name: str, seed: int | None) -> None:
        """Asks a row the facts that it was not asked yet, and writes its answers."""
        key = name if seed is None else f"{name}, seed {seed}"
        before = self.result["rows"].get(key, {})
        marks = before.get("marks", [""] * len(AFTER))
        done = len(marks[0]) // BATCH
        batches = self.batches[done : self.config.until // BATCH or None]
        if not batches:
            return
        row, method = self.build(name, seed)
        commits = list(before.get("commits", []))
        began = time.monotonic() - before.get("seconds", 0.0)
        for more in query_batches(
            method, batches, self.tokenizer, after=AFTER, answer=ANSWER
        ):
            marks = [old + new for old, new in zip(marks, more, strict=True)]
            commit, clean = version()
            commit = f"{commit} with changes" if clean is False else str(commit)
            facts = {
                "marks": marks,
                "seconds": time.monotonic() - began,
                "date": datetime.date.today().isoformat(),
                "commits": [*dict.fromkeys([*commits, commit])],
                "device": device_name(),
            }
            contents = {part: self.result[part] for part in ("facts", "distances")}
            contents["rows"] = {**self.result["rows"], key: {**row, **facts}}
            self.result = write_report(
                self.config.output, QUESTION, settings(self.config), contents
            )
            shares = " ".join(f"{accuracy(right(x))['accuracy']:.2f}" for x in marks)
            say(f"{key}: {shares} of {len(marks[0])}")

    def build(self, name: str, seed: int | None) -> tuple[dict[str, Any], Method]:
        """A row without its answers, and its method; trained first if it is not yet."""
        recipe, backbone = [], self.backbone
        if seed is not None and name in MEMORIES:
            label, method, recipe = self.memory(name, seed)
        else:
            if seed is not None:
                folder = self.config.run_dir / f"tuned-{RATE:g}-{seed}"
                given = adapters.Tuning(RATE, seed, UPDATES), backbone, self.tokenizer
                train_once(folder, lambda: adapters.train(*given, folder))
                recipe = adapters.recipe(folder)
                backbone = adapters.load(folder, backbone)
            (of,) = (x for x in get_args(Baseline) if name in (x, f"{x}, {TUNED}"))
            label, method = baseline(of, backbone, self.tokenizer, self.sizes)
        injected = [(count + 1) * CHUNK for count in AFTER]
        row = {
            "method": name.removesuffix(f", {TUNED}").removesuffix(f", {FITTED}"),
            "label": label,
            "tuned": name.endswith(TUNED),
            "seed": seed,
            "recipe": recipe,
            "kept_bytes": [method.state_bytes(x)._asdict() for x in injected],
            "retriever": "fitted" if name.endswith(FITTED) else None,
        }
        return row, method

    def memory(self, name: str, seed: int) -> tuple[str, Method, list[dict[str, Any]]]:
        """M+ or MemoryLLM, trained by `memjax finetune`."""
        is_mplus = name != "MemoryLLM"
        # Stage 2 is MemoryLLM on the same tasks; no stage before it, as with M+.
        stage = models.stage(3 if is_mplus else 2)
        loop = dataclasses.replace(stage.loop, steps=UPDATES)
        stage = dataclasses.replace(stage, loop=loop, seed=seed)
        run = f"{'mplus' if is_mplus else 'memoryllm'}-{seed}"
        folder = self.config.run_dir / run
        train_once(folder, lambda: finetune.finetune(stage, self.path, folder))
        model, tokenizer = models.load_trained(folder)
        label = name.removesuffix(f", {FITTED}")
        if name.endswith(FITTED):
            model = models.with_fitted_retriever(model, tokenizer, folder)
        elif name == "M+ (attention)":
            label = "M+, attention retrieves"
            model = models.with_attention_retrieval(model)
        return label, LatentMemory(model), models.recipe(folder)


@figure("mplus/retention")
def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the right answers of some rows against the distance."""
    rows = by_method(result)
    curves = {
        rows[name]["label"]: [
            (x["accuracy"], x["low"], x["high"]) for x in rows[name]["after"]
        ]
        for name in PLOTTED
        if name in rows
    }
    title = f"Right answers, of up to {len(result['facts'])} facts; 95% intervals"
    plots.accuracy_by_distance(
        curves, result["distances"], path, title=title, source=source_of(result)
    )


@table("mplus/retention")
def retention(result: dict[str, Any]) -> Rows:
    """Right answers by distance, with the size of the state."""
    asked = len(result["facts"])
    after = [number(distance, 0) for distance in result["distances"]]
    measured = {
        f"{row['date']} in {commit}"
        for row in result["rows"].values()
        for commit in row["commits"]
    }
    yield f"rows measured {', '.join(sorted(measured))}"
    for method in by_method(result).values():
        count = max(row["questions"] for row in method["after"])
        seeds = len(method["seeds"])
        # Where a method could not be asked, it has no state to answer from.
        pairs = zip(method["kept_bytes"], method["after"], strict=True)
        sizes = [size for size, row in pairs if row["questions"]]
        most = max(sizes, key=lambda size: size["device"] + size["host"])
        cells = {
            "right answers (95% interval)": method["label"]
            + (f", {seeds} seeds" if seeds > 1 else ""),
            "facts": str(count) if count == asked else f"{count} of {asked}",
            "state, MB": _megabytes(most["device"] + most["host"]),
            "on the device": _megabytes(most["device"]),
        }
        for distance, row in zip(after, method["after"], strict=True):
            cells[f"after {distance} tokens"] = _share(row)
        for distance, row in zip(after, method["gain"], strict=True):
            interval = "{mean:+.2f} ({low:+.2f} to {high:+.2f})"
            words = interval.format(**row) if row else ""
            cells[f"M+ ahead by, after {distance}"] = words
        yield cells
        yield from map(models.recipe_text, method["recipes"])


def _megabytes(size: int) -> str:
    return number(size / 1e6, 2 if size < 1e6 else 0)


def _share(row: dict[str, Any]) -> str:
    if not row["questions"]:
        return "beyond its positions"
    return "{accuracy:.2f} ({low:.2f} to {high:.2f})".format(**row)


if __name__ == "__main__":
    main(tyro.cli(Config))
