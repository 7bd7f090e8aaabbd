"""Knowledge retention: facts that are answered after more and more injected text.

    python -m experiments.mplus.retention
    python -m experiments.mplus.retention --asked joined --after 0 16 64 256

Question: which facts of the CIA World Factbook does a model still answer that were
injected, inside their context, many tokens ago? (M+, Figures 3, 5, 8 and 9; the authors
have SQuAD and NaturalQA.)
Rows: M+ with its retriever, with a retriever fitted afterwards, and with attention, all
three stages trained, and after fewer and more updates; MemoryLLM, the first two stages;
the backbone with full attention, windows, re-read text, SnapKV, BM25, dense search, and
the question alone, as it came and with adapters trained on M+'s tasks (`adapters.py`).
Columns: share of right answers by distance in tokens; size of the state; seconds a
question; M+'s share minus the row's, paired by fact. An answer is right if it occurs in
ten tokens of greedy decoding. `--asked` asks in other words, of two facts joined, or of
superseded facts (`asked.py`). The other text names neither answer nor country. Facts
that the backbone answers closed book are left out.
All trainings have as many updates, and each the rate
of the most right answers to other facts, whose neighbours were tried.
Not shown: other facts than those of templates. Reading fails at this size if right
answers at distance 0 do not rise with updates.

Answers are stored in the result file, a batch of facts at a time: a call that was
stopped is repeated and continues, and one with `--only` leaves the other rows there.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import jax
import numpy as np

from experiments.lab import backbones, options, results
from experiments.lab.study import climb_rate, digest, once, show_plan, spent, train_once
from experiments.mplus import adapters, models
from experiments.mplus.answers import FITTED, TUNED, accuracy, query_batches, right
from experiments.mplus.asked import Asked, ask_otherwise
from experiments.mplus.methods import (
    Baseline,
    LatentMemory,
    Memory,
    Method,
    baseline,
    sizes_for,
)
from experiments.mplus.samples import Samples, choose_facts, in_rounds, make_samples
from memjax.data import Question
from memjax.evaluation.provenance import commit_of, provenance
from memjax.models.mplus.build import add_mplus
from memjax.status import say
from memjax.training.finetune import finetune

QUESTION = "what does a model still know that was injected many tokens ago?"
#: Rows by name: those with a trained memory, those of the backbone, and those tuned.
CURVE = {f"M+, {count} updates": count for count in (60, 960)}
MEMORIES = (*get_args(Memory), f"M+, {FITTED}", *CURVE)
ROWS = (
    *MEMORIES,
    *get_args(Baseline),
    *(f"{name}, {TUNED}" for name in get_args(Baseline)),
)
#: Updates of a training in all its stages, and the rates that are tried, from `FIRST`.
UPDATES, RATES, FIRST = 240, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 1e-3
#: What is trained, by its name in folders.
TRAINED = {
    "mplus": "M+",
    "memoryllm": "MemoryLLM",
    "backbone": "backbone on the tasks of M+",
}
#: Facts that choose a rate, queried at the first two distances.
VALIDATION = 24
#: Facts, which are queried after these numbers of chunks; text is enough for `MOST`.
SAMPLES, AFTER, MOST = 96, (0, 4, 8, 16), 1024
#: Minutes of a training and of asking a row, on a core; rows that do not read on.
MINUTES, ASKING = 60.0, 60.0
SHORT = ("full attention", "re-read", "BM25", "closed book")
#: Facts side by side, and lengths of questions that are drawn.
BATCH, LENGTHS = 4, 4
#: Tokens of a chunk, into which contexts must fit, and of an answer.
CHUNK, ANSWER = 512, 10


@dataclasses.dataclass(frozen=True)
class Config(options.Options):
    """Settings; a row and a training take an hour each on a core: see `--plan`.

    Attributes:
        only: names of rows; none is all.
        seeds: of the trainings, 3 at least; rows of the curve have the first.
        asked: how facts are asked; other ways have a result file each.
        after: chunks of other text before a question, ascending.
        until: ask only the first facts, a multiple of four; 0 is all.
        plan: print the missing trainings, and stop.
        run_dir: where models are stored.
        output: where .json goes, without the ending.
    """

    only: tuple[Annotated[str, options.among(*ROWS)], ...] = ()
    seeds: options.Seeds = (42, 43, 44)
    asked: Asked = "as stated"
    after: Annotated[
        tuple[Annotated[int, options.within(0, MOST)], ...], options.ascending
    ] = AFTER
    until: Annotated[int, options.within(0, SAMPLES)] = 0
    plan: bool = False
    run_dir: options.Folder = Path("runs/retention")
    output: options.Output = results.RESULTS / "mplus" / "stages"

    def __post_init__(self):
        super().__post_init__()
        if self.after[0] or len(self.after) < 2:
            raise ValueError(f"after must be 0 and more numbers, got {self.after}")
        if self.until % BATCH:
            raise ValueError(f"until must be a multiple of {BATCH}, got {self.until}")

    @property
    def file(self) -> Path:
        """The result file, without the ending."""
        if self.asked == "as stated":
            return self.output
        return self.output.with_name(self.asked.replace(" ", "_"))

    def folder(self, kind: str, rate: float, seed: int, updates: int) -> Path:
        """The folder of a training with all its stages."""
        return self.run_dir / f"{kind}-{updates}-{rate:g}-{seed}"


def main(config: options.Flags[Config]) -> None:
    """Asks every row what the file has no answer to, and writes."""
    names = config.only or ROWS
    if config.plan:
        show_plan(plan(config, names))
        return
    study = Study(config)
    for name in names:
        for seed in seeds_of(name, config.seeds):
            study.ask(name, seed)
            jax.clear_caches()


def trained(name: str) -> str:
    """The training of a row; "" for none."""
    if name in MEMORIES:
        return "memoryllm" if name == "MemoryLLM" else "mplus"
    return "backbone" if name.endswith(TUNED) else ""


def seeds_of(name: str, seeds: tuple[int, ...]) -> tuple[int | None, ...]:
    """The seeds of a row; without training it has none."""
    return seeds[: 1 if name in CURVE else None] if trained(name) else (None,)


def key_of(name: str, seed: int | None) -> str:
    """The name of a row with a seed in the result file."""
    return name if seed is None else f"{name}, seed {seed}"


def plan(config: Config, names: Sequence[str]) -> dict[str, float]:
    """Minutes of the trainings of each kind on a core, and of asking a row."""
    found: dict[str, float] = {}
    file, (first, *others) = Path(f"{config.file}.json"), config.seeds
    before = results.read_object(file, "rows")["rows"] if file.is_file() else {}

    def lacks(kind: str, seed: int, updates: int = UPDATES, rates: int = 1) -> int:
        """Rates that a seed is not trained with, of the number that it needs."""
        folders = (config.folder(kind, rate, seed, updates) for rate in RATES)
        return max(0, rates - sum(spent(folder).finished for folder in folders))

    for name in names:
        keys = (key_of(name, seed) for seed in seeds_of(name, config.seeds))
        rows = [before.get(key, {}) for key in keys]
        done = [len(row["marks"][0]) if row else 0 for row in rows]
        left = sum(max(0, (config.until or SAMPLES) - x) for x in done) / SAMPLES
        read = AFTER[-1] if name.startswith(SHORT) else config.after[-1]
        found[f"asking {name}"] = left * ASKING * max(1.0, read / AFTER[-1])
        if left and (kind := trained(name)):
            # Three rates with the first seed, one with each of the others.
            missing = lacks(kind, first, rates=3) + sum(lacks(kind, x) for x in others)
            found[f"training {kind}"] = missing * MINUTES
            if name in CURVE:
                share = lacks(kind, first, CURVE[name]) * CURVE[name] / UPDATES
                found[f"training {name}"] = share * MINUTES
    return {name: minutes for name, minutes in found.items() if minutes}


class Study:
    """The models, the facts and the result file of a configuration."""

    def __init__(self, config: Config):
        self.config = config
        self.path = backbones.smollm2()
        found = finetune.load_backbone(self.path)
        self.backbone, self.tokenizer = found.model, found.tokenizer
        self.facts = facts = ask_otherwise(models.load_facts(), config.asked)
        prompts = (self.tokenizer.encode(f"\n\n{fact.question}") for fact in facts)
        self.sizes = sizes_for(
            add_mplus(self.backbone, models.stage(3).memory, key=jax.random.key(0)),
            chunk=CHUNK,
            question=max(map(len, prompts)) + ANSWER,
            longest=(config.after[-1] + 1) * CHUNK,
        )
        file, distances = Path(f"{config.file}.json"), [n * CHUNK for n in config.after]
        if file.is_file():
            self.result = results.read_object(file, "facts", "distances", "rows")
            if self.result["distances"] != distances:
                raise ValueError(
                    f"after must be as in {file}, whose distances in tokens are "
                    f"{self.result['distances']}, got {config.after}"
                )
        else:
            asked = self.choose(facts, SAMPLES)
            self.result = {
                "facts": [fact._asdict() for fact in asked],
                "distances": distances,
                "rows": {},
            }
        asked = [Question(**fact) for fact in self.result["facts"]]
        self.batches = self.samples(asked, config.after[-1])

    def choose(self, facts: Sequence[Question], count: int) -> list[Question]:
        """Facts that the backbone does not answer closed book."""
        return choose_facts(
            in_rounds(facts),
            self.tokenizer,
            samples=count,
            batch=BATCH,
            lengths=LENGTHS,
            answer_closed_book=self.answer_closed_book,
        )

    def samples(self, facts: Sequence[Question], chunks: int) -> Sequence[Samples]:
        """Facts with their contexts and so many chunks of other text."""
        passages, sizes = models.passages(), {"batch": BATCH, "chunk": CHUNK}
        return make_samples(facts, passages, self.tokenizer, num_chunks=chunks, **sizes)

    @functools.cached_property
    def validation(self) -> Sequence[Samples]:
        """Facts that no row is asked."""
        asked = {fact["question"] for fact in self.result["facts"]}
        others = [fact for fact in self.facts if fact.question not in asked]
        return self.samples(self.choose(others, VALIDATION), self.config.after[1])

    def rate(self, kind: str) -> float:
        """The rate with the most right answers to the validation facts, by first seed.

        The backbone answers with full attention.
        """
        first = self.config.seeds[0]

        def wrong(rate: float) -> float:
            folder = self.folder(kind, rate, first, UPDATES)
            if kind == "backbone":
                model, name = adapters.load(folder), "full attention"
                _, method = baseline(name, model, self.tokenizer, self.sizes)
            else:
                method = LatentMemory(models.load_trained(folder)[0])
            given = {"after": self.config.after[:2], "answer": ANSWER, "took": []}
            parts = query_batches(method, self.validation, self.tokenizer, **given)
            marks = "".join(mark for batch in parts for mark in batch)
            return 1 - accuracy(right(marks))["accuracy"]

        def stored(rate: float) -> float:
            asked = self.config.asked, self.config.after[:2]
            folder = self.config.run_dir / "rates" / digest(asked)
            file = folder / f"{kind}-{rate:g}.json"
            return once(file, lambda: wrong(rate), [UPDATES, first])

        return climb_rate(RATES, FIRST, stored)["rate"]

    def answer_closed_book(self, prompts: np.ndarray) -> list[str]:
        """The backbone's answers to the questions alone."""
        _, alone = baseline("closed book", self.backbone, self.tokenizer, self.sizes)
        found = alone.query(alone.start(len(prompts)), prompts, ANSWER)
        assert found is not None
        return [self.tokenizer.decode(tokens) for tokens in found]

    def ask(self, name: str, seed: int | None) -> None:
        """Asks a row the facts that it was not asked yet, and writes its answers."""
        key = key_of(name, seed)
        before = self.result["rows"].get(key, {})
        after, took = self.config.after, before.get("query_seconds", [])
        marks = before.get("marks", [""] * len(after))
        done = len(marks[0]) // BATCH
        batches = self.batches[done : self.config.until // BATCH or None]
        if not batches:
            return
        row, method = self.build(name, seed)
        commits = before.get("commits", [])
        began = time.monotonic() - before.get("seconds", 0.0)
        for more in query_batches(
            method, batches, self.tokenizer, after=after, answer=ANSWER, took=took
        ):
            marks = [old + new for old, new in zip(marks, more, strict=True)]
            made = provenance(QUESTION, {})
            facts = {
                "marks": marks,
                "seconds": time.monotonic() - began,
                "query_seconds": took,
                "date": made["date"],
                "commits": [*dict.fromkeys([*commits, commit_of(made)])],
                "device": made["device"],
            }
            rows = self.result["rows"] | {key: row | facts}
            kept = {part: self.result[part] for part in ("facts", "distances")}
            given = QUESTION, results.settings(self.config), kept | {"rows": rows}
            self.result = results.write_report(self.config.file, *given)
            shares = " ".join(f"{accuracy(right(x))['accuracy']:.2f}" for x in marks)
            say(f"{key}: {shares} of {len(marks[0])}")

    def build(self, name: str, seed: int | None) -> tuple[dict[str, Any], Method]:
        """A row without its answers, and its method; trained first if it is not yet."""
        recipe, backbone, folder = [], self.backbone, Path()
        if seed is not None:
            kind, updates = trained(name), CURVE.get(name, UPDATES)
            rate, stage = self.rate(kind), models.stage(3)
            folder = self.folder(kind, rate, seed, updates)
            recipe = [
                {
                    "trained": TRAINED[kind],
                    "stage": "",
                    "updates": updates,
                    "texts_an_update": stage.data.batch_size,
                    "learning_rate": rate,
                    "lora_rank": stage.memory.rank,
                    "seed": seed,
                }
            ]
        if name in MEMORIES:
            model, tokenizer = models.load_trained(folder)
            label = name.removesuffix(f", {FITTED}")
            if name.endswith(FITTED):
                model = models.with_fitted_retriever(model, tokenizer, folder)
            elif name == "M+ (attention)":
                label = "M+, attention retrieves"
                model = models.with_attention_retrieval(model)
            method = LatentMemory(model)
        else:
            if seed is not None:
                backbone = adapters.load(folder)
            (of,) = (x for x in get_args(Baseline) if name in (x, f"{x}, {TUNED}"))
            label, method = baseline(of, backbone, self.tokenizer, self.sizes)
        injected = [(count + 1) * CHUNK for count in self.config.after]
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

    def folder(self, kind: str, rate: float, seed: int, updates: int) -> Path:
        """The folder of a training, of its last stage, once it is done."""
        folder = self.config.folder(kind, rate, seed, updates)
        if kind == "backbone":
            given = adapters.stage(rate, seed, updates), self.path, folder
            train_once(folder, lambda: finetune.finetune(*given))
            return folder
        stages = models.stages(updates, rate, seed, store=kind == "mplus")
        train_once(folder, lambda: finetune.finetune_stages(stages, self.path, folder))
        return folder / stages[-1][0]


if __name__ == "__main__":
    options.run(main)
