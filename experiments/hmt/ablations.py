"""Ablations of HMT: size of the sensory memory, depth of the unrolled gradient.

    python -m experiments.hmt.ablations --group sensory
    python -m experiments.hmt.ablations --group depth

Question: how many tokens should a segment read again from the one before (HMT, Table
8), and through how many segments should gradients flow (HMT, Table 9, Figure 16)?
Rows: HMT with k sensory tokens; HMT and RMT with several segments a sample in stage 2;
an n-gram of the same training documents, where the backbone is trained here.
Columns: perplexity of targets that no model has read; loss difference from the first
row, with an interval over documents, and with each seed.
Not shown: other learning rates than the preset's. A deeper run reads more tokens.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from experiments.hmt import training
from experiments.hmt.rows import COUNTED
from experiments.lab.baselines import ORDER, NGram
from experiments.lab.intervals import (
    format_interval,
    format_seeds,
    loss_difference,
    mean_losses,
)
from experiments.lab.measure import score_once, state_bytes
from experiments.lab.results import RESULTS, Rows, number, show, table
from memjax import evaluation
from memjax.data import load_tokens
from memjax.evaluation import TokenLosses
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage

QUESTIONS = {
    "sensory": "how many tokens should a segment read again from the one before?",
    "depth": "through how many segments should gradients flow?",
}


@dataclasses.dataclass(frozen=True)
class Config(training.Config):
    """See `training.Config`; the results go to `<output>/<group>.json`.

    Attributes:
        group: of rows.
        sensory: sizes k; none is an eighth of a segment, none, and others.
        depths: segments of a sample in stage 2.
    """

    group: Literal["sensory", "depth"] = "sensory"
    preset: training.Preset = "cpu-short"
    sensory: tuple[int, ...] = ()
    depths: tuple[int, ...] = (2, 4, 8)
    output: Path = RESULTS / "hmt"

    def __post_init__(self):
        super().__post_init__()
        segment = self.scale.stages.stage2.hmt.segment_length
        if any(not 0 <= size <= segment for size in self.sensory):
            raise ValueError(f"sensory must be in [0, {segment}], got {self.sensory}")
        if not self.depths or min(self.depths) < 2:
            raise ValueError(f"depths must be at least 2, got {self.depths}")


def rows(config: Config) -> dict[str, tuple[SegmentStage, ...]]:
    """The trainings of a group by name; the first is the baseline of the others."""
    stages = config.scale.stages
    if config.group == "sensory":
        usual = stages.stage2.hmt.segment_length // 8
        sizes = (usual, 0, usual // 4, usual // 2, 2 * usual, 4 * usual)
        return {
            f"k = {size}": _with_sensory(stages, size)
            for size in config.sensory or sizes
        }
    hmt, rmt = {}, {}
    for depth in config.depths:
        last = dataclasses.replace(stages.stage2, depth=depth)
        tokens = last.context_length * last.loop.steps
        name = f"HMT, depth {depth} ({tokens:,} tokens a row)"
        hmt[name] = (stages.stage1, last)
        deep = HMTStages(stages.stage1, last)
        rmt[f"RMT, depth {depth}"] = (training.recurrent_stage(deep),)
    return hmt | rmt


def _with_sensory(stages: HMTStages, size: int) -> tuple[SegmentStage, ...]:
    return tuple(
        dataclasses.replace(
            stage, hmt=dataclasses.replace(stage.hmt, num_sensory_tokens=size)
        )
        for stage in (stages.stage1, stages.stage2)
    )


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    memory, tokens = config.scale.stages.stage2.hmt, config.scale.test_tokens
    segment = memory.segment_length
    _, tokenizer = training.load_backbone(config)
    texts = training.documents(config.source, tokenizer, "test", tokens, segment)
    losses: dict[str, list[TokenLosses]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, stages in rows(config).items():
        losses[name], found[name] = [], {"training_seconds": [], "scoring_seconds": []}
        for seed in config.seeds:
            # The backbone has this seed too.
            each = dataclasses.replace(config, seeds=(seed,))
            folder, seconds = training.train(each, stages, seed)
            model = training.load(folder)
            scored = score_once(
                lambda model=model: training.scorer(model, segment),
                texts,
                folder / "scores",
            )
            losses[name].append(scored.losses)
            found[name]["training_seconds"].append(seconds)
            found[name]["scoring_seconds"].append(scored.seconds)
            found[name]["state_bytes"] = state_bytes(model)
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
    training.write(
        dataclasses.replace(config, output=config.output / config.group),
        question,
        segment=segment,
        scored_from={"causal": memory.summary, "all": 0},
        longest=targets,
        texts=[f"{text.name}: {len(text.tokens) - 1}" for text in texts],
        base=base,
        models=found,
    )
    cells = {
        name: [*row["perplexity"].values(), format_interval(row["gain"], 4)]
        for name, row in found.items()
    }
    show(question, ["PPL, causal", "PPL, all", f"nats/token below {base}"], cells)


def _compared(
    base: list[TokenLosses], found: list[TokenLosses], mask: np.ndarray
) -> dict[str, Any]:
    """Perplexities of a row and differences from the base, one `TokenLosses` a seed."""
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


@table("hmt/ablations", "hmt/sensory", "hmt/depth")
def ablations(*results: dict[str, Any]) -> Rows:
    """Sizes of the sensory memory, and segments that gradients flow through."""
    below = "nats/token below the group's first row"
    for result in results:
        for name, row in result["models"].items():
            first = name == result["base"]
            yield {
                "": name,
                "PPL, causal": number(row["perplexity"]["causal"], 1),
                below: "" if first else format_interval(row["gain"]),
                "with each seed": "" if first else format_seeds(row["gain_by_seed"]),
            }


if __name__ == "__main__":
    main(tyro.cli(Config))
