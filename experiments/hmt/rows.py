"""The models of `experiments.hmt.length`: HMT, RMT, and what they must beat.

Every memory is compared at equal bytes: all that is kept between two tokens counts. HMT
keeps its memories, and the keys and values of the segment that is open. A window with
sinks gets as many bytes. "w tokens again" reads no more tokens at a time than that
window holds, so that with its cache it is no larger; without it, it keeps 4 bytes a
token, and pays in compute. "k tokens again" carries what HMT's sensory memory does and
nothing else. Full attention keeps everything; a text beyond its positions has no score.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from experiments.hmt import scores
from memjax.models import HMTConfig, LanguageModel, ReReadWindow
from memjax.models.base import Model
from memjax.models.hmt.model import HMT
from memjax.models.language_model.windowed import limit_attention
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage

SINKS = 4
# The truncated input: segments of so many tokens, and as many before them.
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
        sizes: what is said of it in the results.
        stages: what it is trained by, in order; none of an untrained model.
        longest: tokens of the longest text; None where there is no bound.
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
        stages: of HMT, whose segment, bytes and number of updates all rows have.
        backbone: as it came.
        counted: whether n-grams are rows too.
    """
    hmt = stages.stage2.hmt
    segment = hmt.segment_length
    size = scores.state_bytes(_shape(backbone, hmt))
    plain = scores.equal_window(backbone, size)
    window = scores.equal_window(backbone, size, SINKS)
    total = dataclasses.replace(
        stages.stage2.loop,
        steps=stages.stage1.loop.steps + stages.stage2.loop.steps,
    )
    baseline = dataclasses.replace(stages.stage2, loop=total)
    tokens = stages.stage2.context_length
    found = _untrained(backbone, plain, window, segment, hmt.num_sensory_tokens)
    if counted:
        found += [Row(COUNTED.format(n), None, 0, {}, order=n) for n in (3, 4)]

    def trained(name: str, *curriculum: SegmentStage) -> Row:
        last = curriculum[-1]
        build = lambda backbone: _build(last, backbone)
        return Row(name, build, _reads(last), _sizes(last), curriculum)

    def reading_again(reread: int, segment: int) -> SegmentStage:
        return dataclasses.replace(
            baseline,
            memory="reread",
            window=segment,
            reread=reread,
            depth=-(-tokens // segment),
        )

    sliding = dataclasses.replace(
        baseline,
        memory="window",
        window=window,
        sinks=SINKS,
        depth=-(-tokens // window),
    )
    previous = dataclasses.replace(hmt, summary_source="previous")
    no_search = dataclasses.replace(hmt, retrieval=False, num_sensory_tokens=0)
    half = segment // 2
    return [
        *found,
        trained(HIERARCHICAL, stages.stage1, stages.stage2),
        trained(TUNED.format(SINK_WINDOW), sliding),
        trained(TUNED.format(SENSORY), reading_again(hmt.num_sensory_tokens, segment)),
        trained(TUNED.format(AGAIN), reading_again(plain - half, half)),
        trained(TUNED.format(APART), reading_again(0, segment)),
        trained(RMT, dataclasses.replace(baseline, hmt=no_search)),
        trained(
            CAUSAL, stages.stage1, dataclasses.replace(stages.stage2, hmt=previous)
        ),
    ]


def _untrained(
    backbone: LanguageModel, plain: int, window: int, segment: int, sensory: int
) -> list[Row]:
    """The backbone as it came, in all the ways to bound what it reads."""
    half = segment // 2

    def again(name: str, reread: int, segment: int) -> Row:
        build = lambda backbone: ReReadWindow(backbone, reread=reread, segment=segment)
        sizes = {"reread": reread, "segment": segment}
        return Row(name, build, (reread + segment) / segment, sizes)

    sinks = {"window": window, "sinks": SINKS}
    slide = lambda *sizes: lambda backbone: limit_attention(backbone, *sizes)
    found = [
        Row(SINK_WINDOW, slide(window, SINKS), 1, sinks),
        again(AGAIN, plain - half, half),
        again(SENSORY, sensory, segment),
        again(APART, 0, segment),
        again(LAST, TRUNCATED, TRUNCATED),
        Row(WINDOW, slide(plain), 1, {"window": plain}),
    ]
    longest = backbone.config.capacity
    return [*found, Row(FULL, lambda backbone: backbone, 1, {}, longest=longest)]


def _build(stage: SegmentStage, backbone: LanguageModel) -> Model:
    """The model that a stage trains, without adapters, whose bytes are not memory."""
    plain = dataclasses.replace(stage, train="full")
    return plain.wrap(backbone, jax.random.key(0))


def _shape(backbone: LanguageModel, config: HMTConfig) -> Model:
    return HMT(backbone, config, key=jax.random.key(0))


def _reads(stage: SegmentStage) -> float:
    """Tokens that the backbone reads for one of the text, summary and prompts too."""
    match stage.memory:
        case "window":
            return 1
        case "reread":
            return (stage.reread + stage.window) / stage.window
    hmt = stage.hmt
    summary = hmt.summary + 2 if hmt.retrieval else 0
    return (
        hmt.num_sensory_tokens + hmt.segment_length + 2 + summary
    ) / hmt.segment_length


def _sizes(stage: SegmentStage) -> dict[str, int]:
    match stage.memory:
        case "window":
            return {"window": stage.window, "sinks": stage.sinks}
        case "reread":
            return {"reread": stage.reread, "segment": stage.window}
    hmt = stage.hmt
    return {
        "segment": hmt.segment_length,
        "sensory": hmt.num_sensory_tokens,
        "memories": hmt.num_memories,
    }
