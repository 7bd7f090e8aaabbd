"""How does perplexity change with the length of the input, and with which memory?

    python -m experiments.hmt.length

HMT, HMT that reads nothing ahead, RMT and the backbone with a sliding window whose
state has as many bytes as HMT's are fine-tuned for as many steps, on samples of no
fewer tokens, and score the same held-out documents (HMT, Figures 2 and 3). Beside them
the same window without fine-tuning, and the backbone on segments that know nothing of
each other, which is what the official program compares with.

There are two tables. "causal": the targets at index j or later in their segment, the
same for all models; no score has seen its target. "all": every target, as the
official program scores; of those, HMT has read the first j of each segment before it
predicts them, and its row says so.
"""

import dataclasses
from pathlib import Path

import tyro

from experiments.common.results import RESULTS, show
from experiments.hmt import common, scores
from memjax import evaluation
from memjax.checks import require_known
from memjax.evaluation import Losses, plots
from memjax.evaluation.drawing import source_of
from memjax.models.language_model.windowed import with_window
from memjax.training.finetune.curricula import HMTStages

HMT = "HMT"
CAUSAL = "HMT, strictly causal"
WINDOW = "window of equal memory"
FROZEN, APART, RMT = "the same, not fine-tuned", "segments apart", "RMT"
OTHERS = (FROZEN, APART, RMT, CAUSAL)
LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """See `common.Config`.

    Attributes:
        lengths: inputs are scored up to these positions; a document that ends before
            counts with what it has.
        only: names of models beside HMT and the window; none given is all.
    """

    lengths: tuple[int, ...] = LENGTHS
    only: tuple[str, ...] = OTHERS
    output: Path = RESULTS / "hmt" / "length"

    def __post_init__(self):
        super().__post_init__()
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1, got {self.lengths}")
        for name in self.only:
            require_known("only", name, OTHERS)


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    stages = config.scale.stages
    segment, first = stages.stage2.hmt.segment, stages.stage2.hmt.summary
    backbone, tokenizer = common.load_backbone(config)
    longest = min(config.scale.test_tokens, max(config.lengths))
    texts = scores.documents(config.source, tokenizer, "test", longest, segment)
    models = _models(config, stages, backbone)
    losses, rows = {}, {}
    for name, (model, seconds) in models.items():
        print(f"scoring {name}", flush=True)
        losses[name], spent = scores.score(model, texts, segment)
        rows[name] = {
            "state_bytes": scores.state_bytes(model),
            "window": model.window,
            "training_seconds": seconds,
            "scoring_seconds": spent,
        }
    report(config, losses, rows, (segment, first))


def _models(config: Config, stages: HMTStages, backbone) -> dict:
    """Every model by name, with the seconds of its training."""
    hmt = common.train_hmt(config, stages)
    window = scores.equal_window(backbone, scores.state_bytes(hmt.model))
    segment = stages.stage2.hmt.segment
    previous = dataclasses.replace(stages.stage2.hmt, summary_source="previous")
    causal = dataclasses.replace(
        stages, stage2=dataclasses.replace(stages.stage2, hmt=previous)
    )
    others = {
        FROZEN: lambda: (with_window(backbone, window), 0.0),
        APART: lambda: (scores.Disjoint(backbone, segment), 0.0),
        RMT: lambda: common.train_recurrent(config, stages, sensory=0),
        CAUSAL: lambda: common.train_hmt(config, causal),
    }
    trained = {WINDOW: common.train_window(config, stages, window), HMT: hmt}
    return trained | {name: others[name]() for name in OTHERS if name in config.only}


def report(
    config: Config, losses: dict[str, Losses], rows: dict, sizes: tuple[int, int]
) -> None:
    """Writes, draws and prints both scorings."""
    targets = next(iter(losses.values())).mask.shape[1]
    lengths = [length for length in config.lengths if length < 2 * targets]
    tables = {}
    for scoring, first in (("causal", sizes[1]), ("all", 0)):
        mask = evaluation.scored(targets, sizes[0], first)
        some = {name: evaluation.restrict(x, mask) for name, x in losses.items()}
        tables[scoring] = {
            "scored_from": first,
            "reads_ahead": [HMT] if scoring == "all" else [],
            "perplexity": scores.by_kind(some, lengths),
            "gain_over_window": {
                name: [
                    scores.gain(some[WINDOW], some[name], length) for length in lengths
                ]
                for name in some
                if name != WINDOW
            },
        }
    some = next(iter(losses.values()))
    reached = [int((some.mask.sum(axis=1) >= length).sum()) for length in lengths]
    result = common.write(
        config,
        "how does perplexity change with the length of the input?",
        lengths=lengths,
        documents_that_reach_it=reached,
        segment=sizes[0],
        models=rows,
        scoring=tables,
    )
    plot(result, Path(f"{config.output}.png"))
    _show(tables, lengths)


def plot(result: dict, path: Path) -> None:
    """Draws the causal scoring of a result."""
    causal = result["scoring"]["causal"]
    plots.perplexity_by_length(
        causal["perplexity"]["all"],
        result["lengths"],
        path,
        title=f"Held-out documents, targets from {causal['scored_from']} on in each "
        "segment",
        source=source_of(result),
    )


def _show(tables: dict, lengths: list[int]) -> None:
    for scoring, table in tables.items():
        curves = table["perplexity"]["all"]
        show(
            f"Perplexity by input length, scoring: {scoring}",
            [f"{length:,}" for length in lengths],
            curves,
        )
    causal = tables["causal"]
    last = causal["gain_over_window"][HMT][-1]
    print(
        f"HMT against the window at {lengths[-1]:,} tokens, causal scoring: "
        f"{last['perplexity_change']:+.1%} perplexity "
        f"({last['nats']:+.4f} ± {last['standard_error']:.4f} nats saved)"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
