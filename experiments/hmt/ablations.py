"""Ablations of HMT: size of the sensory memory, depth of the unrolled gradient.

    python -m experiments.hmt.ablations --group sensory
    python -m experiments.hmt.ablations --group depth

Question: how many tokens should a segment read again from the one before (HMT, Table
8), and through how many segments should gradients flow (HMT, Table 9, Figure 16)?
Rows: HMT with k sensory tokens; HMT and RMT with so many segments a sample in stage 2;
an n-gram of the same training documents, where the backbone is trained here.
Columns: perplexity of targets that no model has read; loss reduction against the first
row, with an interval over documents, and with each seed.
Not shown: other learning rates than the preset's. A deeper run reads more tokens.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from experiments.hmt import common, scores
from experiments.hmt.rows import COUNTED
from experiments.lab.baselines import ORDER, NGram
from experiments.lab.intervals import format_interval, loss_difference, mean_losses
from experiments.lab.results import RESULTS, show
from memjax import evaluation
from memjax.checks import check_sizes
from memjax.data import load_tokens
from memjax.evaluation import TokenLosses
from memjax.training.finetune.curricula import HMTStages

QUESTIONS = {
    "sensory": "how many tokens should a segment read again from the one before?",
    "depth": "through how many segments should gradients flow?",
}


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """See `common.Config`; the results go to `<output>/<group>.json`.

    Attributes:
        group: of rows.
        sensory: sizes k; none is an eighth of a segment, none, and others.
        depths: segments of a sample in stage 2.
        seeds: of every model and of the backbone trained here, from `seed` on.
    """

    group: Literal["sensory", "depth"] = "sensory"
    preset: common.Preset = "cpu-short"
    sensory: tuple[int, ...] = ()
    depths: tuple[int, ...] = (2, 4, 8)
    seeds: int = 2
    output: Path = RESULTS / "hmt"

    def __post_init__(self):
        super().__post_init__()
        check_sizes(seeds=self.seeds)
        segment = self.scale.stages.stage2.hmt.segment_length
        if any(not 0 <= size <= segment for size in self.sensory):
            raise ValueError(f"sensory must be in [0, {segment}], got {self.sensory}")
        if not self.depths or min(self.depths) < 2:
            raise ValueError(f"depths must be at least 2, got {self.depths}")


Train = Callable[[common.Config], common.Trained]


def rows(config: Config) -> dict[str, Train]:
    """The models of a group by name; the first is the baseline of the others."""
    stages = config.scale.stages
    found: dict[str, Train] = {}

    def add(name: str, train: Callable[..., common.Trained], *given: Any) -> None:
        found[name] = lambda config: train(config, *given)

    if config.group == "sensory":
        usual = stages.stage2.hmt.segment_length // 8
        sizes = (usual, 0, usual // 4, usual // 2, 2 * usual, 4 * usual)
        for size in config.sensory or sizes:
            add(f"k = {size}", common.train_hmt, _with_sensory(stages, size))
        return found
    cases = {depth: _with_depth(stages, depth) for depth in config.depths}
    for depth, case in cases.items():
        tokens = case.stage2.context_length * case.stage2.loop.steps
        name = f"HMT, depth {depth} ({tokens:,} tokens a row)"
        add(name, common.train_hmt, case)
    for depth, case in cases.items():
        add(f"RMT, depth {depth}", common.train_recurrent, case, 0)
    return found


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    memory = config.scale.stages.stage2.hmt
    segment = memory.segment_length
    _, tokenizer = common.load_backbone(config)
    texts = scores.documents(
        config.source, tokenizer, "test", config.scale.test_tokens, segment
    )
    losses: dict[str, list[TokenLosses]] = {}
    found: dict[str, dict] = {}
    for name, train in rows(config).items():
        trained = [train(each) for each in common.each_seed(config, config.seeds)]
        scored = [scores.score(one.model, texts, segment) for one in trained]
        losses[name] = [one for one, _ in scored]
        found[name] = {
            "training_seconds": [one.seconds for one in trained],
            "scoring_seconds": [spent for _, spent in scored],
            "state_bytes": scores.state_bytes(trained[0].model),
        }
    base = next(iter(losses))
    if config.scale.backbone == "tiny":
        name = COUNTED.format(ORDER)
        train = load_tokens(config.source, tokenizer, "train")
        losses[name] = [NGram(train, ORDER, tokenizer.vocab_size).losses(texts)]
        found[name] = {}
    targets = losses[base][0].mask.shape[1]
    mask = evaluation.scored_mask(targets, segment, memory.summary)
    for name, row in found.items():
        row |= _compared(losses[base], losses[name], mask)
    question = QUESTIONS[config.group]
    common.write(
        dataclasses.replace(config, output=config.output / config.group),
        question,
        segment=segment,
        scored_from={"causal": memory.summary, "all": 0},
        longest=targets,
        texts=[f"{text.name}: {len(text.tokens) - 1}" for text in texts],
        base=base,
        models=found,
    )
    show(
        question,
        ["PPL, causal", "PPL, all (HMT reads ahead)", f"loss reduction against {base}"],
        {
            name: [*row["perplexity"].values(), format_interval(row["gain"], 4)]
            for name, row in found.items()
        },
    )


def _compared(
    base: list[TokenLosses], found: list[TokenLosses], mask: np.ndarray
) -> dict[str, Any]:
    """Perplexities and gains of one row, one of `TokenLosses` a seed."""
    causal = [evaluation.mask_losses(losses, mask) for losses in found]
    causal_base = [evaluation.mask_losses(losses, mask) for losses in base]
    mean = mean_losses(causal)
    # An n-gram has no seed: it is compared with the mean alone.
    pairs = zip(causal_base, causal, strict=True) if len(base) == len(found) else ()
    return {
        "perplexity": {
            "causal": evaluation.perplexity(mean),
            "all": evaluation.perplexity(mean_losses(found)),
        },
        "gain": loss_difference(mean_losses(causal_base), mean),
        "gain_by_seed": [loss_difference(a, b)["nats"] for a, b in pairs],
    }


def _with_sensory(stages: HMTStages, size: int) -> HMTStages:
    first, second = (
        dataclasses.replace(
            stage, hmt=dataclasses.replace(stage.hmt, num_sensory_tokens=size)
        )
        for stage in (stages.stage1, stages.stage2)
    )
    return HMTStages(first, second)


def _with_depth(stages: HMTStages, depth: int) -> HMTStages:
    return HMTStages(stages.stage1, dataclasses.replace(stages.stage2, depth=depth))


if __name__ == "__main__":
    main(tyro.cli(Config))
