"""Perplexity by the length of the input, for HMT, RMT and baselines of equal size.

    python -m experiments.hmt.length
    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.hmt.length --preset smollm2-cpu --source folder:comparison \\
        --output experiments/results/hmt/smollm2/length

Question: does a hierarchical memory lower the perplexity of long texts? (HMT, Figures 2
and 3.)
Rows: HMT as published and without reading ahead, RMT, and the backbone in all the ways
to bound what it reads (`rows.py`), as it came and fine-tuned for as many updates. The
learning rate of each row is chosen on validation documents with the first seed.
Columns: size of the state; tokens read for one of the text; perplexity of the tokens up
to each length. Targets count from index j of their segment on, the same for all rows,
so no score has seen its target. Intervals are over documents, of the mean over seeds.
Not shown: longer trainings; documents longer than the corpus has.

Every text is scored once for all calls. With `--only` the other rows are shown as far
as they are finished.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.hmt import training
from experiments.hmt.rows import (
    AGAIN,
    APART,
    CAUSAL,
    FULL,
    HIERARCHICAL,
    RMT,
    SENSORY,
    SINK_WINDOW,
    TUNED,
    Row,
    rows,
)
from experiments.lab.baselines import NGram
from experiments.lab.intervals import (
    format_interval,
    loss_difference,
    mean_losses,
    select_kind,
)
from experiments.lab.measure import Scored, score_once, state_bytes
from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    number,
    show,
    table,
    thousands,
)
from experiments.lab.study import choose_rate, digest, once, selected
from memjax import evaluation
from memjax.checks import check_sizes
from memjax.config_io import to_record
from memjax.data import Split, TokenisedDocument, load_tokens
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import source_of

TUNED_WINDOW = TUNED.format(SINK_WINDOW)
#: What every other row is compared with, where it is there.
BASES = (
    SINK_WINDOW,
    TUNED_WINDOW,
    TUNED.format(SENSORY),
    TUNED.format(AGAIN),
    TUNED.format(APART),
)
MEMORIES = (HIERARCHICAL, CAUSAL, RMT)
#: The lines of the plot.
PLOTTED = (
    HIERARCHICAL,
    CAUSAL,
    TUNED_WINDOW,
    TUNED.format(AGAIN),
    FULL,
    SINK_WINDOW,
)
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)
Texts = Sequence[TokenisedDocument]


@dataclasses.dataclass(frozen=True)
class Config(training.Config):
    """See `training.Config`.

    Attributes:
        lengths: inputs are scored up to these positions; a document that ends before
            counts with what it has.
        validation_tokens: scored of each validation document.
        rates: learning rates that are tried; none is the preset's.
        only: names of rows to work on; none is all.
    """

    lengths: tuple[int, ...] = LENGTHS
    validation_tokens: int = 2048
    rates: tuple[float, ...] = ()
    only: tuple[str, ...] = ()
    output: Path = RESULTS / "hmt" / "length"

    def __post_init__(self):
        super().__post_init__()
        check_sizes(validation_tokens=self.validation_tokens)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1, got {self.lengths}")


class Finished(NamedTuple):
    """A row with its scores.

    Attributes:
        losses: averaged over seeds.
        facts: of its training and scoring.
        reached: tokens of the longest text that counts.
    """

    losses: TokenLosses
    facts: dict[str, Any]
    reached: int


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes, row by row."""
    study = Study(config)
    finished: dict[str, Finished] = {}
    wanted = selected(config.only, [row.name for row in study.rows])
    # Finished rows of earlier calls are shown from the first row on.
    for row in study.rows:
        if study.file(row).is_file():
            finished[row.name] = study.measure(row)
    for row in study.rows:
        if row.name in wanted:
            print(f"row: {row.name}", flush=True)
            finished[row.name] = study.measure(row)
            report(study, finished)


class Study:
    """Rows and texts of a configuration."""

    def __init__(self, config: Config):
        self.config, scale = config, config.scale
        memory = scale.stages.stage2.hmt
        backbone, tokenizer = training.load_backbone(config)
        self.rows = rows(scale.stages, backbone, counted=scale.backbone == "tiny")
        self.segment, self.first = memory.segment_length, memory.summary
        self.longest = min(scale.test_tokens, max(config.lengths))

        def documents(split: Split, tokens: int) -> Texts:
            return training.documents(
                config.source, tokenizer, split, tokens, self.segment
            )

        self.texts = documents("test", self.longest)
        self.validation = documents("validation", config.validation_tokens)
        self.bytes = {
            row.name: state_bytes(row.build(backbone), self.longest)
            for row in self.rows
            if row.build is not None
        }

    def file(self, row: Row) -> Path:
        """Where the facts of a row are stored, once it is finished."""
        return self.config.run_dir / "rows" / f"{digest(self.identity(row))}.json"

    def identity(self, row: Row) -> dict[str, Any]:
        """Settings that a row depends on."""
        config = self.config
        return {
            "row": row.name,
            "sizes": dict(row.sizes),
            "stages": [to_record(stage) for stage in row.stages],
            "backbone": str(training.backbone_path(config)),
            "source": config.source,
            "tokens": [self.longest, config.validation_tokens],
            "rates": config.rates or config.scale.rates,
            "seeds": config.seeds,
        }

    def measure(self, row: Row) -> Finished:
        """The scores of a row, which is trained before if it has stages."""
        reached, facts = row.longest or self.longest, {}
        texts = [x._replace(tokens=x.tokens[: reached + 1]) for x in self.texts]
        if row.stages:
            rate, tried = self.rate(row)
            facts |= {"learning_rate": rate, "validation_perplexity": tried}
            runs = [self.trained(row, rate, seed, texts) for seed in self.config.seeds]
        else:
            runs = [(self.untrained(row, texts), 0.0)]
        losses = [scored.losses for scored, _ in runs]
        first, seconds = runs[0]
        if row.stages:
            facts |= {
                "seeds": len(runs),
                "perplexity_by_seed": [self.perplexity(x) for x in losses],
                "training_seconds": seconds,
            }
        facts |= {
            "scoring_seconds": first.seconds,
            "devices": sorted({x for run, _ in runs for x in run.devices}),
        }
        facts = once(self.file(row), lambda: facts, self.identity(row))
        return Finished(mean_losses(losses), facts, reached)

    def rate(self, row: Row) -> tuple[float, dict[str, float]]:
        """The rate with the lowest validation loss, and the perplexities of all."""
        config = self.config
        rates = config.rates or config.scale.rates

        def validation_loss(rate: float) -> float:
            run, _ = self.trained(row, rate, config.seeds[0], self.validation)
            return float(np.log(self.perplexity(run.losses)))

        identity = self.identity(row) | {"seeds": config.seeds[:1]}
        file = config.run_dir / "rates" / f"{digest(identity)}.json"
        found = choose_rate(rates, validation_loss, file, {"row": row.name})
        tried = zip(rates, found.get("validation", ()), strict=False)
        return found["rate"], {str(rate): float(np.exp(x)) for rate, x in tried}

    def trained(
        self, row: Row, rate: float, seed: int, texts: Texts
    ) -> tuple[Scored, float]:
        """Scores of the row trained with a rate and a seed, and its seconds."""
        folder, seconds = training.train(self.config, row.stages, seed, rate)

        def prepare():
            return training.scorer(training.load(folder), self.segment)

        return score_once(prepare, texts, folder / "scores"), seconds

    def untrained(self, row: Row, texts: Texts) -> Scored:
        """Scores of a row without training."""
        config = self.config
        backbone = str(training.backbone_path(config))
        key = digest([backbone, self.segment, row.name, dict(row.sizes)])

        def prepare():
            backbone, tokenizer = training.load_backbone(config)
            if row.build is not None:
                return training.scorer(row.build(backbone), self.segment)
            # The documents that the backbone was trained on.
            train = load_tokens(config.source, tokenizer, "train")
            counted = NGram(train, row.order, tokenizer.vocab_size)
            return lambda text: counted.losses([text])

        return score_once(prepare, texts, config.run_dir / "scores" / key)

    def mask(self, losses: TokenLosses) -> TokenLosses:
        """The losses of targets that no row has read ahead."""
        mask = evaluation.scored_mask(losses.mask.shape[1], self.segment, self.first)
        return evaluation.mask_losses(losses, mask)

    def perplexity(self, losses: TokenLosses) -> float:
        """Of these targets."""
        return evaluation.perplexity(self.mask(losses))


def report(study: Study, finished: Mapping[str, Finished]) -> None:
    """Writes, draws and prints the rows that are finished."""
    config, texts = study.config, study.texts
    targets = max(len(text.tokens) - 1 for text in texts)
    lengths = [length for length in config.lengths if length < 2 * targets]
    present = [row for row in study.rows if row.name in finished]
    losses = {
        row.name: study.mask(_padded(finished[row.name].losses, targets))
        for row in present
    }
    reach = {row.name: finished[row.name].reached for row in present}
    kinds = [None, *dict.fromkeys(text.kind for text in texts)]
    result = training.write(
        config,
        "how does perplexity change with the length of the input?",
        lengths=lengths,
        documents={text.name: len(text.tokens) - 1 for text in texts},
        segment=study.segment,
        scored_from=study.first,
        models={
            row.name: {
                "state_bytes": study.bytes.get(row.name),
                "reads": row.reads,
                **row.sizes,
                **finished[row.name].facts,
            }
            for row in present
        },
        missing=[row.name for row in study.rows if row.name not in finished],
        perplexity={
            kind or "all": {
                name: [
                    evaluation.perplexity(up_to(x, length), kind=kind)
                    if length <= reach[name]
                    else None
                    for length in lengths
                ]
                for name, x in losses.items()
            }
            for kind in kinds
        },
        gains=_differences(losses, lengths, reach, kinds),
    )
    plot(result, Path(f"{config.output}.png"))
    cells = {
        name: ["" if value is None else value for value in values]
        for name, values in result["perplexity"]["all"].items()
    }
    show("Perplexity by input length", [f"{length:,}" for length in lengths], cells)


def _differences(
    losses: Mapping[str, TokenLosses],
    lengths: list[int],
    reach: Mapping[str, int],
    kinds: Sequence[str | None],
) -> list[dict[str, Any]]:
    """Of every row against each base, and of each memory against every row, by kind.

    At the shortest length, and at the longest that both models read.
    """
    found = []
    for base in losses:
        for name in losses:
            if name == base or not (base in BASES or name in MEMORIES):
                continue
            both_reach = [x for x in lengths if x <= min(reach[base], reach[name])]
            for length in dict.fromkeys(both_reach[:1] + both_reach[-1:]):
                for kind in kinds:
                    first, second = (
                        up_to(select_kind(losses[x], kind), length)
                        for x in (base, name)
                    )
                    where = {"base": base, "model": name, "length": length}
                    where["kind"] = kind or "all"
                    found.append(where | loss_difference(first, second))
    return found


def up_to(losses: TokenLosses, length: int) -> TokenLosses:
    """The first `length` positions."""
    return losses._replace(nll=losses.nll[:, :length], mask=losses.mask[:, :length])


def _padded(losses: TokenLosses, targets: int) -> TokenLosses:
    """The losses with `targets` columns; those beyond a text's end do not count."""
    more = ((0, 0), (0, targets - losses.nll.shape[1]))
    return losses._replace(nll=np.pad(losses.nll, more), mask=np.pad(losses.mask, more))


@figure("hmt/smollm2/length")
def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the perplexities of some rows."""
    found = result["perplexity"]["all"]
    shown = [name for name in PLOTTED if name in found]
    plots.perplexity_by_length(
        {
            name: [np.nan if value is None else value for value in found[name]]
            for name in shown or found
        },
        result["lengths"],
        path,
        title=f"Held-out documents, targets from {result['scored_from']} on in each "
        "segment",
        source=source_of(result),
    )


@table("hmt/length", "hmt/smollm2/length")
def length(result: dict[str, Any]) -> Rows:
    """Perplexity by row and length of the input."""
    for name, values in result["perplexity"]["all"].items():
        facts = result["models"][name]
        trained = "none"
        if "learning_rate" in facts:
            seeds = facts["seeds"]
            trained = f"rate {facts['learning_rate']:g}, {seeds} seed{'s'[: seeds > 1]}"
        cells = {
            "PPL": name,
            "state, bytes": number(facts["state_bytes"], 0),
            "tokens read for one": number(facts["reads"], 2),
            "training": trained,
        }
        for tokens, value in zip(result["lengths"], values, strict=True):
            cells[f"{thousands(tokens)} tokens"] = number(value, 2)
        yield cells
    for name in result["missing"]:
        yield {"PPL": f"{name} (not run yet)"}


@table("hmt/length_difference", "hmt/smollm2/length")
def length_difference(result: dict[str, Any]) -> Rows:
    """Loss of the tuned window minus each row's, at the longest input of both."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for gain in result["gains"]:
        if gain["base"] == TUNED_WINDOW:
            # The longest comes last.
            found.setdefault(gain["model"], {})[gain["kind"]] = gain
    for name, by in found.items():
        cells = {f"nats/token below the {TUNED_WINDOW}": name}
        cells["tokens"] = thousands(by["all"]["length"])
        yield cells | {kind: format_interval(x) for kind, x in by.items()}


if __name__ == "__main__":
    main(tyro.cli(Config))
