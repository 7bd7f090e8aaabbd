"""Compares sizes of HMT: trains each by both stages and scores it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.gains import gain, shown
from experiments.common.results import show
from experiments.hmt import common, scores
from memjax import evaluation
from memjax.evaluation import Losses
from memjax.training.finetune.curricula import HMTStages


def measure(
    config: common.Config,
    question: str,
    cases: Mapping[str, HMTStages],
    baselines: Mapping[str, HMTStages] | None = None,
    paper: Mapping[str, Any] | None = None,
) -> None:
    """Trains and scores every case, prints and writes them.

    Gains are against the first case, with intervals over documents where there are
    enough. They say how sure a difference between these two trained models is, not
    between their kinds: there is one seed.

    Args:
        config: `output` names the results.
        question: that they answer.
        cases: HMT of each value; all have one segment length and one j.
        baselines: sizes for which RMT is trained.
        paper: what the paper found, to stand beside it.
    """
    memory = next(iter(cases.values())).stage2.hmt
    segment = memory.segment
    backbone, tokenizer = common.load_backbone(config)
    texts = scores.documents(
        config.source, tokenizer, "test", config.scale.test_tokens, segment
    )
    losses: dict[str, Losses] = {}
    rows: dict[str, dict] = {}

    def add(name: str, trained: common.Trained) -> None:
        losses[name], spent = scores.score(trained.model, texts, segment)
        rows[name] = {
            "training_seconds": trained.seconds,
            "scoring_seconds": spent,
            "state_bytes": scores.state_bytes(trained.model),
        }

    for name, stages in cases.items():
        add(name, common.train_hmt(config, stages))
    for name, stages in (baselines or {}).items():
        add(name, common.train_recurrent(config, stages, sensory=0))
    base = next(iter(cases))
    length = losses[base].mask.shape[1]
    mask = evaluation.scored(length, segment, memory.summary)
    some = {name: evaluation.restrict(x, mask) for name, x in losses.items()}
    for name, row in rows.items():
        row["perplexity"] = {
            "causal": evaluation.perplexity(some[name]),
            "all": evaluation.perplexity(losses[name]),
        }
        row["gain"] = gain(some[base], some[name])
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
    print(f"wrote {Path(config.output).name}.json")
