"""Rows of `experiments.hmt.length`: HMT, RMT, and the baselines of equal state size.

Everything between two tokens counts. HMT's state is its memories and the keys and
values of the open segment; a window with sinks has as many bytes. "w tokens again"
reads no more tokens at a time than that window has, and stores 4 bytes a token, for
more compute. "k tokens again" re-reads as many tokens as HMT's sensory memory has, and
nothing else. Full attention stores everything, up to the backbone's positions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from experiments.hmt.training import recurrent_stage, reread_stage, window_stage
from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes
from memjax.models import LanguageModel, ReReadWindow
from memjax.models.base import Model
from memjax.models.hmt.model import HMT
from memjax.models.language_model.windowed import limit_attention
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage

SINKS = 4
#: The truncated input: tokens of a segment, and of the text before it.
TRUNCATED = 512
HIERARCHICAL, CAUSAL, RMT = "HMT", "HMT, strictly causal", "RMT"
WINDOW, SINK_WINDOW = "window", "window with sinks"
AGAIN, SENSORY, APART = "w tokens again", "k tokens again", "segments apart"
FULL, LAST = "full attention", "the last 512 to 1,023 tokens"
COUNTED = "{}-gram"
TUNED = "{}, tuned"


class Row(NamedTuple):
    """A model of the table.

    Attributes:
        name: of the row.
        build: the model, made from the backbone; of a row that is trained its form.
        reads: tokens that the backbone reads for one of the text.
        sizes: of the model, for the result file.
        stages: its training, in order; none of an untrained model.
        longest: tokens of the longest text; None without a bound.
        order: of an n-gram, which is counted instead of built.
    """

    name: str
    build: Callable[[LanguageModel], Model] | None
    reads: float
    sizes: Mapping[str, int]
    stages: tuple[SegmentStage, ...] = ()
    longest: int | None = None
    order: int = 0


def rows(stages: HMTStages, backbone: LanguageModel, counted: bool) -> list[Row]:
    """All rows, those that need no training first.

    Args:
        stages: of HMT; all rows have its segment, bytes and number of updates.
        backbone: as it came.
        counted: whether n-grams are rows too.
    """
    hmt = stages.stage2.hmt
    segment, sensory = hmt.segment_length, hmt.num_sensory_tokens
    size = state_bytes(HMT(backbone, hmt, key=jax.random.key(0)))
    plain = equal_window(backbone, size)
    window = equal_window(backbone, size, SINKS)
    half = segment // 2
    found = [
        _window(SINK_WINDOW, window, SINKS),
        _again(AGAIN, plain - half, half),
        _again(SENSORY, sensory, segment),
        _again(APART, 0, segment),
        _again(LAST, TRUNCATED, TRUNCATED),
        _window(WINDOW, plain),
        Row(FULL, lambda model: model, 1, {}, longest=backbone.config.capacity),
    ]
    if counted:
        found += [Row(COUNTED.format(n), None, 0, {}, order=n) for n in (3, 4)]
    causal = dataclasses.replace(
        stages.stage2, hmt=dataclasses.replace(hmt, summary_source="previous")
    )
    trained = {
        HIERARCHICAL: (stages.stage1, stages.stage2),
        TUNED.format(SINK_WINDOW): (window_stage(stages, window, SINKS),),
        TUNED.format(SENSORY): (reread_stage(stages, sensory, segment),),
        TUNED.format(AGAIN): (reread_stage(stages, plain - half, half),),
        TUNED.format(APART): (reread_stage(stages, 0, segment),),
        RMT: (recurrent_stage(stages),),
        CAUSAL: (stages.stage1, causal),
    }
    return found + [_trained(name, of) for name, of in trained.items()]


def _window(name: str, window: int, sinks: int = 0) -> Row:
    sizes = {"window": window} | ({"sinks": sinks} if sinks else {})
    return Row(name, lambda model: limit_attention(model, window, sinks), 1, sizes)


def _again(name: str, reread: int, segment: int) -> Row:
    def build(backbone: LanguageModel) -> Model:
        return ReReadWindow(backbone, reread=reread, segment=segment)

    sizes = {"reread": reread, "segment": segment}
    return Row(name, build, (reread + segment) / segment, sizes)


def _trained(name: str, stages: tuple[SegmentStage, ...]) -> Row:
    last = stages[-1]

    def build(backbone: LanguageModel) -> Model:
        # Without adapters, which are no part of the state.
        plain = dataclasses.replace(last, train="full")
        return plain.wrap(backbone, jax.random.key(0))

    reads, sizes = _reads_and_sizes(last)
    return Row(name, build, reads, sizes, stages)


def _reads_and_sizes(stage: SegmentStage) -> tuple[float, dict[str, int]]:
    """Tokens that the backbone reads for one of the text, prompts too; and sizes."""
    match stage.memory:
        case "window":
            return 1, {"window": stage.window, "sinks": stage.sinks}
        case "reread":
            sizes = {"reread": stage.reread, "segment": stage.window}
            return (stage.reread + stage.window) / stage.window, sizes
    hmt = stage.hmt
    segment, sensory = hmt.segment_length, hmt.num_sensory_tokens
    summary = hmt.summary + 2 if hmt.retrieval else 0
    sizes = {"segment": segment, "sensory": sensory, "memories": hmt.num_memories}
    return (sensory + segment + 2 + summary) / segment, sizes
