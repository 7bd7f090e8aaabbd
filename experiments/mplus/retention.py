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
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import tyro

from experiments.hmt.questions import majority_exact
from experiments.lab import backbones
from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    number,
    settings,
    show,
    table,
    thousands,
    write_report,
)
from experiments.lab.study import check_rates, choose_rate, selected, train_once
from experiments.mplus import adapters, models, retriever
from experiments.mplus.answers import (
    FITTED,
    TUNED,
    accuracy,
    by_method,
    closed_book_answers,
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
from experiments.mplus.samples import Samples, make_samples, samples_of
from memjax.checks import check_sizes
from memjax.data import Question
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of
from memjax.evaluation.provenance import device_name, version
from memjax.models import LanguageModel
from memjax.models.mplus.build import add_mplus
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
#: Facts and distances that choose the adapters' rate.
VALIDATION_FACTS, VALIDATION_AFTER = 24, (0, 4)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; a row takes about an hour on a core, a training 40 minutes.

    Attributes:
        only: names of rows; none is all.
        seeds: of the trainings.
        rates: learning rates of the adapters; validation facts choose one.
        updates: of M+, MemoryLLM and the adapters.
        preset: of `memjax finetune`, for sizes and tasks.
        backbone: "smollm2", or a model as `memjax finetune` takes it.
        samples: number of facts, a multiple of `batch`.
        until: ask only the first of them, a multiple of `batch`; 0 is all.
        batch: facts side by side.
        lengths: number of the most frequent lengths of questions that are drawn, as
            programs are compiled for each; 0 is all.
        after: query after these numbers of chunks, rising.
        chunk: tokens of a chunk; contexts must fit.
        answer: tokens that are generated.
        seed: of the draws of facts and text.
        run_dir: where models are stored.
        output: where .json and .png go, without the ending.
    """

    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (42, 43)
    rates: tuple[float, ...] = (3e-4, 1e-3)
    updates: int = 240
    preset: str = "mplus-smollm2-135m"
    backbone: str = "smollm2"
    samples: int = 96
    until: int = 0
    batch: int = 4
    lengths: int = 4
    after: tuple[int, ...] = (0, 4, 8, 16)
    chunk: int = 512
    answer: int = 10
    seed: int = 0
    run_dir: Path = Path("runs/retention")
    output: Path = RESULTS / "mplus" / "retention"

    def __post_init__(self):
        names = ("updates", "samples", "batch", "chunk", "answer")
        check_sizes(**{name: getattr(self, name) for name in names})
        check_sizes(seeds=len(self.seeds))
        check_rates(self.rates)
        rising = list(self.after) == sorted({*self.after})
        if not self.after or not rising or self.after[0] < 0:
            raise ValueError(f"after must rise from 0 or more, got {self.after}")
        if self.until % self.batch:
            raise ValueError(
                f"until must be a multiple of batch={self.batch}, got {self.until}"
            )
        selected(self.only, ROWS)


def main(config: Config) -> None:
    """Asks every row what the file has no answer to; prints, draws and writes."""
    study = Study(config)
    for name in selected(config.only, ROWS):
        is_trained = name in MEMORIES or name.endswith(TUNED)
        for seed in config.seeds if is_trained else (None,):
            study.ask(name, seed)
            jax.clear_caches()
    result = json.loads(Path(f"{config.output}.json").read_text())
    plot(result, Path(f"{config.output}.png"))
    shares = {
        row["label"]: [found["accuracy"] for found in row["after"]]
        for row in by_method(result).values()
    }
    columns = [f"{distance:,}" for distance in result["distances"]]
    shares["most frequent answer"] = [result["majority_exact"]["all"]] * len(columns)
    show("Right answers by distance in tokens", columns, shares)


class Study:
    """The models, the facts and the result file of a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.path = backbones.located(config.backbone)
        found = finetune.load_backbone(self.path)
        self.backbone, self.tokenizer = found.model, found.tokenizer
        self.tuning = adapters.Tuning(
            preset=config.preset,
            learning_rate=config.rates[0],
            seed=config.seeds[0],
            updates=config.updates,
            backbone=Path(found.origin).name,
            backbone_digest=found.digest,
        )
        facts = models.load_facts_of("test")
        prompts = (self.tokenizer.encode(f"\n\n{fact.question}") for fact in facts)
        memory = models.stage(config.preset, 3).memory
        self.sizes = sizes_for(
            add_mplus(self.backbone, memory, key=jax.random.key(0)),
            chunk=config.chunk,
            question=max(map(len, prompts)) + config.answer,
            longest=(config.after[-1] + 1) * config.chunk,
        )
        self.result = self.read()
        if self.result is None:
            self.batches = self.draw(facts, config.samples, config.after[-1])
            asked = [fact for batch in self.batches for fact in batch.facts]
            rest = [fact for fact in facts if fact not in {*asked}]
            self.write(
                {
                    "facts": [fact._asdict() for fact in asked],
                    "distances": [count * config.chunk for count in config.after],
                    "majority_exact": majority_exact(rest, asked),
                    "rows": {},
                }
            )
            return
        self.batches = samples_of(
            [Question(**fact) for fact in self.result["facts"]],
            models.passages(),
            self.tokenizer,
            batch=config.batch,
            num_chunks=config.after[-1],
            chunk=config.chunk,
            seed=config.seed,
        )

    def draw(self, facts: list[Question], samples: int, chunks: int) -> list[Samples]:
        """Samples of facts that the backbone does not answer closed book."""
        config = self.config
        _, alone = baseline("closed book", self.backbone, self.tokenizer, self.sizes)
        return make_samples(
            facts,
            models.passages(),
            self.tokenizer,
            samples=samples,
            batch=config.batch,
            num_chunks=chunks,
            chunk=config.chunk,
            lengths=config.lengths,
            seed=config.seed,
            apart=True,
            answer_closed_book=functools.partial(
                closed_book_answers, alone, self.tokenizer, config.answer
            ),
        )

    def read(self) -> dict[str, Any] | None:
        """The result file; None if there is none.

        Raises:
            ValueError: if it was written with other settings.
        """
        file, config = Path(f"{self.config.output}.json"), self.config
        if not file.is_file():
            return None
        found = json.loads(file.read_text("utf-8"))
        names = ("batch", "answer", "seed", "chunk")
        same = {name: found["config"][name] for name in names}
        same["samples"] = len(found["facts"])
        same["after"] = tuple(x // same["chunk"] for x in found["distances"])
        for name, old in same.items():
            if old != (new := getattr(config, name)):
                raise ValueError(
                    f"{name}={new!r} must be that of the rows in {file}, {old!r}; or "
                    "give another output"
                )
        return found

    def write(self, contents: Mapping[str, Any]) -> None:
        """Writes the result file."""
        given = settings(self.config)
        self.result = write_report(self.config.output, QUESTION, given, contents)

    def ask(self, name: str, seed: int | None) -> None:
        """Asks a row the facts that it was not asked yet.

        Raises:
            ValueError: if the file has answers of another model under its name.
        """
        config, result = self.config, self.result
        assert result is not None
        key = name if seed is None else f"{name}, seed {seed}"
        before = result["rows"].get(key, {})
        marks = before.get("marks", [""] * len(config.after))
        done = len(marks[0]) // config.batch
        batches = self.batches[done : config.until // config.batch or None]
        if not batches:
            return
        row, method = self.build(name, seed)
        if before and _identity(before) != _identity(row):
            raise ValueError(f"{key!r} in {config.output}.json is of another model")
        commits = list(before.get("commits", []))
        began = time.monotonic() - before.get("seconds", 0.0)
        for more in query_batches(
            method, batches, self.tokenizer, after=config.after, answer=config.answer
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
            parts = ("facts", "distances", "majority_exact")
            rows = {**result["rows"], key: {**row, **facts}}
            self.write({part: result[part] for part in parts} | {"rows": rows})
            shares = " ".join(f"{accuracy(right(x))['accuracy']:.2f}" for x in marks)
            print(f"{key}: {shares} of {len(marks[0])}", flush=True)

    def build(self, name: str, seed: int | None) -> tuple[dict[str, Any], Method]:
        """A row without its answers, and its method; trained first if it is not yet."""
        if name in MEMORIES:
            assert seed is not None
            label, method, recipe = self.memory(name, seed)
        elif name.endswith(TUNED):
            assert seed is not None
            folder = self.adapters(self.rate(), seed)
            tuned = adapters.load(folder, self.backbone)
            label, method = self.baseline(name, tuned)
            recipe = adapters.recipe(folder)
        else:
            recipe = []
            label, method = self.baseline(name, self.backbone)
        injected = [(count + 1) * self.config.chunk for count in self.config.after]
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

    def baseline(self, name: str, backbone: LanguageModel) -> tuple[str, Method]:
        """A method of the backbone."""
        (method,) = (x for x in get_args(Baseline) if name in (x, f"{x}, {TUNED}"))
        return baseline(method, backbone, self.tokenizer, self.sizes)

    def memory(self, name: str, seed: int) -> tuple[str, Method, list[dict[str, Any]]]:
        """M+ or MemoryLLM, trained by `memjax finetune`."""
        config, is_mplus = self.config, name != "MemoryLLM"
        # Stage 2 is MemoryLLM on the same tasks; no stage before it, as with M+.
        stage = models.stage(config.preset, 3 if is_mplus else 2)
        loop = dataclasses.replace(stage.loop, steps=config.updates)
        stage = dataclasses.replace(stage, loop=loop, seed=seed)
        folder = config.run_dir / f"{'mplus' if is_mplus else 'memoryllm'}-{seed}"
        train_once(folder, lambda: finetune.finetune(stage, self.path, folder))
        model, _ = models.load_trained(name, folder)
        label = name.removesuffix(f", {FITTED}")
        if name.endswith(FITTED):
            file = folder / "fitted.safetensors"
            if not file.is_file():
                retriever.main(retriever.Config(folder, file))
            model = retriever.read(model, file)
        elif name == "M+ (attention)":
            model = models.with_attention_retrieval(model)
            label = "M+, attention retrieves"
        return label, LatentMemory(model), models.recipe(folder)

    def adapters(self, rate: float, seed: int) -> Path:
        """Folder of the backbone's adapters, trained unless they are there."""
        tuning = dataclasses.replace(self.tuning, learning_rate=rate, seed=seed)
        folder = self.config.run_dir / f"tuned-{rate:g}-{seed}"
        given = (tuning, self.backbone, self.tokenizer, folder)
        train_once(folder, lambda: adapters.train(*given))
        return folder

    def rate(self) -> float:
        """The adapters' learning rate with the most right answers in validation."""
        config = self.config

        @functools.cache
        def batches() -> list[Samples]:
            facts = models.load_facts_of("validation")
            return self.draw(facts, VALIDATION_FACTS, VALIDATION_AFTER[-1])

        def share_of_wrong(rate: float) -> float:
            folder = self.adapters(rate, config.seeds[0])
            _, method = self.baseline(
                "full attention", adapters.load(folder, self.backbone)
            )
            found = query_batches(
                method,
                batches(),
                self.tokenizer,
                after=VALIDATION_AFTER,
                answer=config.answer,
            )
            return 1 - float(np.mean([right(x).mean() for part in found for x in part]))

        chosen = choose_rate(
            config.rates,
            share_of_wrong,
            config.run_dir / "tuned-rate.json",
            {"updates": config.updates, "preset": config.preset},
        )
        return chosen["rate"]


def _identity(row: Mapping[str, Any]) -> tuple:
    """Model and training of a row."""
    trainings = [
        [stage[part] for part in ("updates", "learning_rate", "seed")]
        for stage in row["recipe"]
    ]
    return row["label"], row["kept_bytes"], trainings


@figure("mplus/retention")
def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the right answers of some rows against the distance."""
    rows = by_method(result)
    plots.accuracy_by_distance(
        {
            rows[name]["label"]: [
                (x["accuracy"], x["low"], x["high"]) for x in rows[name]["after"]
            ]
            for name in PLOTTED
            if name in rows
        },
        result["distances"],
        path,
        title=f"Right answers, of up to {len(result['facts'])} facts; 95% intervals",
        source=source_of(result),
    )


@table("mplus/retention")
def retention(result: dict[str, Any]) -> Rows:
    """Right answers by distance, with the size of the state."""
    asked = len(result["facts"])
    after = [thousands(distance) for distance in result["distances"]]
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
            cells[f"M+ ahead by, after {distance}"] = _difference(row)
        yield cells
        yield from map(models.recipe_text, method["recipes"])


def _megabytes(size: int) -> str:
    return number(size / 1e6, 2 if size < 1e6 else 0)


def _share(row: dict[str, Any]) -> str:
    if not row["questions"]:
        return "beyond its positions"
    return f"{row['accuracy']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _difference(found: Mapping[str, float] | None) -> str:
    """A difference with both ends of its interval."""
    if found is None:
        return ""
    return f"{found['mean']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"


if __name__ == "__main__":
    main(tyro.cli(Config))
