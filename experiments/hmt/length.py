"""Perplexity by the length of the input, for HMT, RMT and baselines of equal size.

    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.hmt.length --source folder:comparison

Question: does a hierarchical memory lower the perplexity of long texts? (HMT, Figures 2
and 3.)
Rows: HMT as published and without reading ahead, RMT, and the backbone in all the ways
to bound what it reads (`rows.py`), as it came and fine-tuned on as many scored targets,
by samples of 16 segments. The learning rate of each row is chosen on validation
documents with the first seed, its neighbours tried until the best is inside.
Columns: size of the state; tokens read for one of the text; perplexity of the tokens up
to each length. Targets count from index j of their segment on, the same for all rows,
so no score has seen its target. Intervals are over documents, of the mean over seeds.
The curve has strictly causal HMT, k tokens again and the window after more and fewer
targets: HMT's memories are undertrained if the first two close by the last.
Not shown: longer trainings; documents longer than the corpus has.

Every text is scored once for all calls. With `--only` the other rows are shown as far
as they are finished. `--plan` prints the missing rows, 17 hours in all.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np

from experiments.hmt import length_tables
from experiments.hmt.rows import APART, CAUSAL, NAMES, SENSORY, TUNED, Row, rows, scored
from experiments.lab import backbones, options
from experiments.lab.intervals import loss_difference, mean_losses, select_kind
from experiments.lab.measure import Scored, score_once, score_text, state_bytes
from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.lab.study import (
    climb_rate,
    digest,
    once,
    show_plan,
    train_once,
    use_compile_cache,
)
from memjax import evaluation
from memjax.config_io import to_record
from memjax.data import Split, TokenisedDocument, load_tokens
from memjax.evaluation import TokenLosses
from memjax.models.adapters import merge_lora
from memjax.status import say
from memjax.training import LoopConfig, StepConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.hmt_presets import presets
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig

#: What every other row is compared with.
BASES = (length_tables.TUNED_WINDOW, TUNED.format(APART))
#: Inputs are scored up to these positions; shorter documents count as they are.
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
#: Segments of a sample, and those of it that gradients of a memory flow through.
DEPTH, TRUNCATED = 16, 4
#: Tokens of a validation document, the learning rates that it chooses from, the first.
VALIDATION_TOKENS, RATES, FIRST = 2048, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 1e-3
#: Rows of the curve; of "k tokens again" HMT has the memories beside.
CURVE = (CAUSAL, TUNED.format(SENSORY), length_tables.TUNED_WINDOW)
#: Segments that are read in one call.
TOGETHER = 16
#: Minutes of a training, for a target and a token read for one, on two cores.
MINUTES = 9e-5
Texts = Sequence[TokenisedDocument]


@dataclasses.dataclass(frozen=True)
class Config(options.Options):
    """Settings.

    Attributes:
        only: names of rows to work on; none is all.
        seeds: of new parameters and data order; 3 at least.
        targets: scored in the training of each row.
        curve: the same for the rows of `CURVE`, with the first seed.
        plan: print the missing rows, and stop.
        source: documents, as `memjax train` takes them.
        backbone: "smollm2", or a model as `memjax finetune` takes it.
        run_dir: where models are stored.
        output: where .json and .png go, without the ending.
    """

    only: tuple[Annotated[str, options.among(*NAMES)], ...] = ()
    seeds: options.Seeds = (0, 1, 2)
    targets: options.Count = 150_000
    curve: options.Counts = (75_000, 300_000, 600_000)
    plan: bool = False
    source: str = "embedded"
    backbone: str = "smollm2"
    run_dir: options.Folder = Path("runs/hmt")
    output: options.Output = RESULTS / "hmt" / "smollm2" / "length"

    def __post_init__(self):
        super().__post_init__()
        # Every stage of a row has an update: the first has a quarter of the targets.
        first, last = (getattr(hmt_stages(), x) for x in ("stage1", "stage2"))
        tokens = last.data.batch_size * last.context_length
        least = max(4 * scored(first), 2 * tokens)
        if (found := min(self.targets, *self.curve)) < least:
            raise ValueError(f"targets and curve must be at least {least}, got {found}")


def hmt_stages() -> HMTStages:
    """HMT on the real model in float32, by adapters; every predicted target counts.

    The first stage has samples of 2 segments; their updates are set by `rows`.
    """
    two = cast(HMTStages, presets()["hmt-smollm-135m"])

    def stage(of: SegmentStage, depth: int) -> SegmentStage:
        sizes = {"segment_length": 128, "num_sensory_tokens": 16}
        rates = dict(learning_rate=1e-3, warmup_ratio=0.05, final_ratio=0.0)
        return dataclasses.replace(
            of,
            hmt=dataclasses.replace(of.hmt, **sizes),
            optimizer=dataclasses.replace(of.optimizer, **rates),
            depth=depth,
            loop=LoopConfig(steps=1, save_every=50, log_every=4, keep=1),
            dtype="float32",
            train="lora",
            step=StepConfig(loss_on="scored", bptt_blocks=TRUNCATED),
            data=SampleConfig(batch_size=1),
        )

    return HMTStages(stage(two.stage1, 2), stage(two.stage2, DEPTH))


def main(config: options.Flags[Config]) -> None:
    """Trains what is not trained yet, scores, prints and writes, row by row."""
    options.require_corpus("source", config.source)
    study = Study(config)
    wanted = config.only or NAMES
    if config.plan:
        show_plan(study.plan(wanted))
        return
    use_compile_cache(config.run_dir)
    # Finished rows of earlier calls are shown from the first row on.
    finished = {
        row.name: study.measure(row) for row in study.rows if study.file(row).is_file()
    }
    for row in study.rows:
        if row.name in wanted:
            say(f"row: {row.name}")
            finished[row.name] = study.measure(row)
            report(study, finished)
    for name, row in study.curve_rows():
        if name in wanted or study.file(row).is_file():
            say(f"row: {row.name}")
            study.on_curve(name, row)
            report(study, finished)


class Study:
    """Rows and texts of a configuration."""

    def __init__(self, config: Config):
        self.config, self.stages = config, hmt_stages()
        memory = self.stages.stage2.hmt
        self.segment, self.first = memory.segment_length, memory.summary
        self.path = backbones.located(config.backbone)
        found = finetune.load_backbone(self.path)
        self.backbone = found.model
        self.rows = rows(self.stages, found.model, config.targets)

        def documents(split: Split, most: int) -> Texts:
            """Cut to whole segments of at most `most` tokens, and one target more."""
            texts = []
            for text in load_tokens(config.source, found.tokenizer, split):
                segments = min(most, len(text.tokens) - 1) // self.segment
                tokens = np.asarray(text.tokens[: segments * self.segment + 1])
                if segments:
                    texts.append(text._replace(tokens=tokens))
            return texts

        #: Perplexity by row and targets, as far as they are trained.
        self.curve: dict[str, dict[int, float]] = {}
        self.texts = documents("test", max(LENGTHS))
        self.validation = documents("validation", VALIDATION_TOKENS)

    def file(self, row: Row) -> Path:
        """Where the facts of a row are stored, once it is finished."""
        return self.config.run_dir / "rows" / f"{digest(self.identity(row))}.json"

    def identity(self, row: Row) -> dict[str, Any]:
        """Settings that a row depends on."""
        return {
            "row": row.name,
            "stages": [to_record(stage) for stage in row.stages],
            "backbone": str(self.path),
            "source": self.config.source,
            "tokens": [max(LENGTHS), VALIDATION_TOKENS],
            "rates": RATES,
            "seeds": self.config.seeds,
        }

    def measure(self, row: Row) -> tuple[TokenLosses, dict[str, Any]]:
        """Losses of a row, averaged over seeds, and facts of training and scoring."""
        texts = [x._replace(tokens=x.tokens[: reach(row) + 1]) for x in self.texts]
        rate, tried = self.rate(row) if row.is_trained else (0.0, {})
        seeds = self.config.seeds if row.is_trained else (0,)
        runs = [self.scored(row, rate, seed, texts) for seed in seeds]
        facts = {
            "scoring_seconds": runs[0][0].seconds,
            "devices": sorted({x for run, _ in runs for x in run.devices}),
        }
        if row.is_trained:
            facts |= {
                "targets": row.targets,
                "learning_rate": rate,
                "validation_perplexity": tried,
                "seeds": len(runs),
                "perplexity_by_seed": [self.perplexity(x.losses) for x, _ in runs],
                "training_seconds": runs[0][1],
            }
        facts = once(self.file(row), lambda: facts, self.identity(row))
        return mean_losses([run.losses for run, _ in runs]), facts

    def rate(self, row: Row) -> tuple[float, dict[str, float]]:
        """The rate with the lowest validation loss, and the perplexities of all."""

        def validation_loss(rate: float) -> float:
            run, _ = self.scored(row, rate, self.config.seeds[0], self.validation)
            return float(np.log(self.perplexity(run.losses)))

        found = climb_rate(RATES, FIRST, validation_loss)
        tried = {rate: float(np.exp(loss)) for rate, loss in found["tried"].items()}
        return found["rate"], tried

    def curve_rows(self) -> Iterator[tuple[str, Row]]:
        """Rows of the curve, by the name of the row whose rate they have."""
        for name, targets in itertools.product(CURVE, self.config.curve):
            made = rows(self.stages, self.backbone, targets)
            (row,) = (row for row in made if row.name == name)
            yield name, row._replace(name=f"{name}, {targets:,} targets")

    def on_curve(self, name: str, row: Row) -> None:
        """Perplexity of a row of the curve, at the rate of the row `name`."""

        def measure() -> float:
            (own,) = (row for row in self.rows if row.name == name)
            given = self.rate(own)[0], self.config.seeds[0], self.texts
            return self.perplexity(self.scored(row, *given)[0].losses)

        found = once(self.file(row), measure, self.identity(row))
        self.curve.setdefault(name, {})[row.targets] = found

    def plan(self, names: Sequence[str]) -> dict[str, float]:
        """Minutes of the rows that are not finished."""
        # Three rates with the first seed, one with each of the others.
        made = [(x, 2 + len(self.config.seeds)) for x in self.rows if x.name in names]
        made += [(row, 1) for name, row in self.curve_rows() if name in names]
        return {
            row.name: trainings * MINUTES * row.reads * row.targets
            for row, trainings in made
            if not self.file(row).is_file()
        }

    def scored(
        self, row: Row, rate: float, seed: int, texts: Texts
    ) -> tuple[Scored, float]:
        """Scores of a row, trained with a rate and a seed, and the training's seconds.

        Several segments are read in a call.
        """
        if row.is_trained:
            folder, seconds = self.train(row, rate, seed)
            folder = folder / "scores"
        else:
            key = digest(self.identity(row) | {"seeds": None})
            folder, seconds = self.config.run_dir / "scores" / key, 0.0

        def prepare() -> Callable[[TokenisedDocument], TokenLosses]:
            if row.is_trained:
                model = merge_lora(finetune.load(folder.parent)[1])
            else:
                model = row.build(self.backbone)
            return score_text(model, TOGETHER * self.segment)

        return score_once(prepare, texts, folder), seconds

    def train(self, row: Row, rate: float, seed: int) -> tuple[Path, float]:
        """Trains the stages of a row, unless they are trained.

        Returns the folder of the last one, and the seconds of all. A folder is named by
        the settings that it depends on: rows share their stages.
        """
        folder, seconds = None, 0.0
        for stage in row.stages:
            data = dataclasses.replace(stage.data, source=self.config.source)
            optimizer = dataclasses.replace(stage.optimizer, learning_rate=rate)
            changes = {"data": data, "optimizer": optimizer, "seed": seed}
            stage, start = dataclasses.replace(stage, **changes), folder
            key = digest([to_record(stage), str(start or self.path)])
            folder = self.config.run_dir / f"model-{key}"
            given = stage, None if start else self.path, folder, start
            run = functools.partial(finetune.finetune, *given)
            seconds += train_once(folder, run).seconds
        assert folder is not None  # Trained rows have stages.
        return folder, seconds

    def mask(self, losses: TokenLosses) -> TokenLosses:
        """The losses of targets that no row has read ahead."""
        mask = evaluation.scored_mask(losses.mask.shape[1], self.segment, self.first)
        return evaluation.mask_losses(losses, mask)

    def perplexity(self, losses: TokenLosses) -> float:
        """Of these targets."""
        return evaluation.perplexity(self.mask(losses))


def reach(row: Row) -> int:
    """Tokens of the longest text that a row reads."""
    return min(row.longest or max(LENGTHS), max(LENGTHS))


def report(
    study: Study, finished: Mapping[str, tuple[TokenLosses, dict[str, Any]]]
) -> None:
    """Writes, draws and prints the rows that are finished."""
    present = [row for row in study.rows if row.name in finished]
    losses = {row.name: study.mask(finished[row.name][0]) for row in present}
    lengths = {row.name: [x for x in LENGTHS if x <= reach(row)] for row in present}
    kinds = [None, *dict.fromkeys(text.kind for text in study.texts)]

    def perplexities(kind: str | None) -> dict[str, list[float | None]]:
        return {
            name: [
                evaluation.perplexity(up_to(x, length), kind=kind)
                if length in lengths[name]
                else None
                for length in LENGTHS
            ]
            for name, x in losses.items()
        }

    results = {
        "training": to_record(study.stages),
        "lengths": LENGTHS,
        "documents": {text.name: len(text.tokens) - 1 for text in study.texts},
        "segment": study.segment,
        "scored_from": study.first,
        "models": {
            row.name: {
                "state_bytes": state_bytes(row.build(study.backbone), max(LENGTHS)),
                "reads": row.reads,
                **finished[row.name][1],
            }
            for row in present
        },
        "curve": study.curve,
        "missing": [row.name for row in study.rows if row.name not in finished],
        "perplexity": {kind or "all": perplexities(kind) for kind in kinds},
        "gains": _differences(losses, lengths, kinds),
    }
    question = "how does perplexity change with the length of the input?"
    given = settings(study.config)
    result = write_report(study.config.output, question, given, results)
    length_tables.plot.draw(result, Path(f"{study.config.output}.png"))
    show(question, length_tables.length.rows(result))


def _differences(
    losses: Mapping[str, TokenLosses],
    lengths: Mapping[str, list[int]],
    kinds: Sequence[str | None],
) -> list[dict[str, Any]]:
    """Of every row against each base, by kind, at the longest that both models read."""
    found = []
    for base in (x for x in BASES if x in losses):
        for name in (x for x in losses if x != base):
            length = min(lengths[base][-1], lengths[name][-1])
            for kind in kinds:
                first, second = (
                    up_to(select_kind(losses[x], kind), length) for x in (base, name)
                )
                where = {"base": base, "model": name, "length": length}
                where["kind"] = kind or "all"
                found.append(where | loss_difference(first, second))
    return found


def up_to(losses: TokenLosses, length: int) -> TokenLosses:
    """The first `length` positions."""
    return losses._replace(nll=losses.nll[:, :length], mask=losses.mask[:, :length])


if __name__ == "__main__":
    options.run(main)
