"""Rows of `experiments.hmt.length`: HMT, RMT, and the baselines of equal state size.

HMT's state is its memories and the keys and values of the open segment; a window with
sinks has as many bytes. "w tokens again" reads no more tokens at a time than that
window has, and stores 4 bytes a token, for more compute. "k tokens again" re-reads as
many tokens as HMT's sensory memory has, and nothing else. Full attention stores
everything, up to the backbone's positions.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes
from memjax.models import LanguageModel
from memjax.models.base import Model
from memjax.models.hmt.model import HMT
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage

SINKS = 4
#: The truncated input: tokens of a segment, and of the text before it.
TRUNCATED = 512
HIERARCHICAL, CAUSAL, RMT = "HMT", "HMT, strictly causal", "RMT"
WINDOW, SINK_WINDOW = "window", "window with sinks"
AGAIN, SENSORY, APART = "w tokens again", "k tokens again", "segments apart"
FULL, LAST = "full attention", "the last 512 to 1,023 tokens"
TUNED = "{}, tuned"
_BOTH = (SINK_WINDOW, AGAIN, SENSORY, APART)
NAMES = (*_BOTH, LAST, WINDOW, FULL, CAUSAL, HIERARCHICAL)
NAMES += (*map(TUNED.format, _BOTH), RMT)


def scored(stage: SegmentStage) -> int:
    """Targets that an update scores: none that a summary has read ahead."""
    targets = stage.data.batch_size * stage.context_length
    if stage.memory == "hmt" and stage.hmt.reads_ahead:
        return targets - targets * stage.hmt.summary // stage.hmt.segment_length
    return targets


def with_targets(stage: SegmentStage, targets: int) -> SegmentStage:
    """The stage with the number of updates that scores `targets` targets."""
    loop = dataclasses.replace(stage.loop, steps=round(targets / scored(stage)))
    return dataclasses.replace(stage, loop=loop)


class Row(NamedTuple):
    """A model of the table; an untrained row is wrapped as in the last of its stages.

    `longest` are the tokens of the longest text that it reads; None without a bound.
    """

    name: str
    stages: tuple[SegmentStage, ...] = ()
    is_trained: bool = False
    longest: int | None = None

    def build(self, backbone: LanguageModel) -> Model:
        """The untrained model; adapters, no part of the state, are left out."""
        if not self.stages:
            return backbone
        plain = dataclasses.replace(self.stages[-1], train="full")
        return plain.wrap(backbone, jax.random.key(0))

    @property
    def targets(self) -> int:
        """Targets that its training scores."""
        if not self.is_trained:
            return 0
        return sum(stage.loop.steps * scored(stage) for stage in self.stages)

    @property
    def reads(self) -> float:
        """Tokens that the backbone reads for one of the text, prompts too."""
        if not self.stages or self.stages[-1].memory == "window":
            return 1
        stage = self.stages[-1]
        if stage.memory == "reread":
            return (stage.reread + stage.window) / stage.window
        hmt = stage.hmt
        summary = hmt.summary + 2 if hmt.retrieval else 0
        whole = hmt.num_sensory_tokens + hmt.segment_length + 2 + summary
        return whole / hmt.segment_length


def baseline(stages: HMTStages, segment: int, **changes: Any) -> SegmentStage:
    """Stage 2 as a model of such segments, which has no memory to cut gradients in.

    Its samples have no fewer tokens than those of HMT.
    """
    last = stages.stage2
    return dataclasses.replace(
        last,
        window=segment,
        depth=-(-last.context_length // segment),
        step=dataclasses.replace(last.step, bptt_blocks=0),
        **changes,
    )


def rows(stages: HMTStages, backbone: LanguageModel, targets: int) -> list[Row]:
    """All rows, those that need no training first.

    All have the segment and bytes of HMT's stages, and score as many `targets`; of HMT
    a quarter of them without retrieval.
    """
    hmt = stages.stage2.hmt
    segment, half = hmt.segment_length, hmt.segment_length // 2
    size = state_bytes(HMT(backbone, hmt, key=jax.random.key(0)))
    plain = equal_window(backbone, size)

    def window(tokens: int, sinks: int) -> SegmentStage:
        return baseline(stages, tokens, memory="window", sinks=sinks)

    def reread(tokens: int, segment: int) -> SegmentStage:
        return baseline(stages, segment, memory="reread", reread=tokens)

    both = {
        SINK_WINDOW: window(equal_window(backbone, size, SINKS), SINKS),
        AGAIN: reread(plain - half, half),
        SENSORY: reread(hmt.num_sensory_tokens, segment),
        APART: reread(0, segment),
    }
    untrained = both | {LAST: reread(TRUNCATED, TRUNCATED), WINDOW: window(plain, 0)}
    tuned = {TUNED.format(name): stage for name, stage in both.items()}

    def changed(**changes: Any) -> SegmentStage:
        memory = dataclasses.replace(hmt, **changes)
        return dataclasses.replace(stages.stage2, hmt=memory)

    # Its gradients are cut as those of HMT.
    recurrence = changed(retrieval=False, num_sensory_tokens=0)
    causal, rest = changed(summary_source="previous"), targets - targets // 4
    first = with_targets(stages.stage1, targets // 4)
    # Strictly causal first: it is the form that can be used.
    trained = {
        CAUSAL: (first, with_targets(causal, rest)),
        HIERARCHICAL: (first, with_targets(stages.stage2, rest)),
        **{name: (with_targets(x, targets),) for name, x in tuned.items()},
        RMT: (with_targets(recurrence, targets),),
    }
    return [
        *(Row(name, (stage,)) for name, stage in untrained.items()),
        Row(FULL, longest=backbone.config.capacity),
        *(Row(name, of, is_trained=True) for name, of in trained.items()),
    ]
