"""Compares sizes of HMT: trains each by both stages and scores it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.hmt import common, scores
from experiments.hmt.rows import COUNTED
from experiments.lab.baselines import ORDER, NGram
from experiments.lab.intervals import gain, mean_losses, shown
from experiments.lab.results import show
from memjax import evaluation
from memjax.checks import check_sizes
from memjax.data import TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation import TokenLosses
from memjax.training.finetune.curricula import HMTStages


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """See `common.Config`.

    Attributes:
        seeds: of every model, from `seed` on, and of the backbone trained here.
    """

    preset: common.Preset = "cpu-short"
    seeds: int = 2

    def __post_init__(self):
        super().__post_init__()
        check_sizes(seeds=self.seeds)


def measure(
    config: Config,
    question: str,
    cases: Mapping[str, HMTStages],
    baselines: Mapping[str, HMTStages] | None = None,
    paper: Mapping[str, Any] | None = None,
) -> None:
    """Trains and scores every case, prints and writes them.

    Gains are against the first case, of losses averaged over seeds, with intervals over
    documents where there are enough; and with each seed alone. An n-gram stands beside
    models whose backbone is trained here: what they must beat to say anything.

    Args:
        config: `output` names the results.
        question: that they answer.
        cases: HMT of each value; all have one segment length and one j.
        baselines: sizes for which RMT is trained.
        paper: what the paper found, to stand beside it.
    """
    memory = next(iter(cases.values())).stage2.hmt
    segment = memory.segment
    _, tokenizer = common.load_backbone(config)
    texts = scores.documents(
        config.source, tokenizer, "test", config.scale.test_tokens, segment
    )
    losses: dict[str, list[TokenLosses]] = {}
    rows: dict[str, dict] = {}

    def add(name: str, train: Callable[[common.Config], common.Trained]) -> None:
        trained = [train(each) for each in common.each_seed(config, config.seeds)]
        scored = [scores.score(one.model, texts, segment) for one in trained]
        losses[name] = [found for found, _ in scored]
        rows[name] = {
            "training_seconds": [one.seconds for one in trained],
            "scoring_seconds": [spent for _, spent in scored],
            "state_bytes": scores.state_bytes(trained[0].model),
        }

    for name, stages in cases.items():
        add(name, lambda each, stages=stages: common.train_hmt(each, stages))
    for name, stages in (baselines or {}).items():
        add(name, lambda each, stages=stages: common.train_recurrent(each, stages, 0))
    if config.scale.backbone == "tiny":
        name = COUNTED.format(ORDER)
        losses[name], rows[name] = [_counted(config, tokenizer, texts)], {}
    base = next(iter(cases))
    length = losses[base][0].mask.shape[1]
    mask = evaluation.scored_mask(length, segment, memory.summary)
    for name, row in rows.items():
        row |= _compared(losses[base], losses[name], mask)
    common.write(
        config,
        question,
        segment=segment,
        scored_from={"causal": memory.summary, "all": 0},
        longest=length,
        texts=[f"{text.name}: {len(text.tokens) - 1}" for text in texts],
        base=base,
        models=rows,
        paper=dict(paper or {}),
    )
    show(
        question,
        ["PPL, causal", "PPL, all (HMT reads ahead)", f"nats saved against {base}"],
        {
            name: [*row["perplexity"].values(), shown(row["gain"], 4)]
            for name, row in rows.items()
        },
    )
    print(f"wrote {config.output.name}.json")


def _counted(
    config: Config, tokenizer: Tokenizer, texts: tuple[TokenisedDocument, ...]
) -> TokenLosses:
    """The n-gram of the documents that the backbone was trained on."""
    train = load_tokens(config.source, tokenizer, "train")
    return NGram(train, ORDER, tokenizer.vocab_size).losses(texts)


def _compared(
    base: list[TokenLosses], found: list[TokenLosses], mask: np.ndarray
) -> dict[str, Any]:
    """Perplexities and gains of one row, one of `TokenLosses` a seed."""
    causal = lambda losses: evaluation.mask_losses(losses, mask)
    mean = mean_losses(found)
    # An n-gram has no seed: it is compared with the mean alone.
    pairs = zip(base, found, strict=True) if len(base) == len(found) else ()
    return {
        "perplexity": {
            "causal": evaluation.perplexity(causal(mean)),
            "all": evaluation.perplexity(mean),
        },
        "gain": gain(causal(mean_losses(base)), causal(mean)),
        "gain_by_seed": [gain(causal(a), causal(b))["nats"] for a, b in pairs],
    }
