"""The rows of the comparison at equal bytes: what is trained, and what is scored.

All rows have one backbone and are tuned on equal texts by adapters of one rank in all
layers. The hypothesis that was named before: memories that the query heads of a group
share are ahead of the window of their bytes. All else explores. A memory beside the
window has as many bytes in the chosen layers as the longer windows of
"wide", as near as its sizes come; one that the query heads of a group share has a
third, as "wide-shared"; rows of equal width have 64 slots, as many as a head is wide.
A memory is aligned before it is tuned; "wide-shared-longer" has as many updates in
all. HMT and RMT have a segment and the memories of the longest text.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from experiments.lab import baselines, options
from memjax.models import LanguageModel
from memjax.models.hmt.config import HMTConfig
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.language_model.retrofit import MemoryHeads, MemoryName, MemoryOptions
from memjax.models.language_model.windowed import (
    limit_attention,
    set_capacity,
    widen_windows,
)
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.retrofit_stages import PartConfig, RetrofitStages
from memjax.training.finetune.run import AnyStage
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import StepConfig

Stages = tuple[tuple[str, AnyStage], ...]
#: Of the layer-wise distillation, which has no adapters.
DISTILLATION_RATE = 5e-3
#: With which every stage of a row has one.
LEAST_UPDATES = 4


@dataclasses.dataclass(frozen=True)
class Sizes(options.Options):
    """Sizes and training of all rows.

    Attributes:
        window: tokens that an attention layer sees.
        sinks: first tokens that it sees too.
        layers: that have a memory or a wider window; of SmolLM2 the three whose window
            alone costs most, as `memjax finetune retrofit --layers auto` measures it.
        more: tokens of keys and values with the bytes of a memory in a layer, if each
            query head has one.
        context: tokens of a training text, two windows or a larger multiple.
        updates: of one text each, in all stages together but a distillation, which sees
            half of the texts before.
        passes: of a distillation over its texts.
        rate: learning rate, of the adapters and of new parameters.
        dtype: of activations.
        corpus: source of all documents, see `experiments.corpus.comparison`.
    """

    window: options.Tokens = 256
    sinks: options.Natural = 4
    layers: tuple[Annotated[int, options.within(0, 1023)], ...] = (18, 20, 23)
    more: options.Tokens = 97
    context: options.Tokens = 2048
    updates: Annotated[int, options.within(LEAST_UPDATES)] = 160
    passes: options.Count = 6
    rate: options.Rate = 1e-3
    dtype: Dtype = "float32"
    corpus: str = "folder:comparison"

    def __post_init__(self):
        super().__post_init__()
        options.whole_windows("context", self.context, self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup(Sizes):
    """The model and the training of a row.

    Attributes:
        backbone: the pretrained model.
        tokens: of the longest text that is read.
        seed: of new parameters and data order.
    """

    backbone: LanguageModel
    tokens: int
    seed: int = 0

    def data(self) -> SampleConfig:
        """One text an update."""
        return SampleConfig(self.corpus, batch_size=1, validation_texts=4)

    def optimizer(self, rate: float | None = None) -> OptimizerConfig:
        """Warm-up and a cosine; adapters have no weight decay."""
        return OptimizerConfig(
            learning_rate=rate or self.rate, warmup_ratio=0.1, weight_decay=0.0
        )

    def loop(self, steps: int) -> LoopConfig:
        """Checkpoints as often as they do not cost much."""
        every = max(20, steps // 5)
        return LoopConfig(steps=max(steps, 1), save_every=every, log_every=4, keep=1)


def wide_window(
    model: LanguageModel, setup: Setup, heads: MemoryHeads = "query"
) -> LanguageModel:
    """Windows that are longer by a memory's bytes in the chosen layers."""
    more = baselines.equal_tokens(model, setup.more, heads)
    return widen_windows(_window(model, setup), setup.layers, more)


def full_attention(model: LanguageModel, setup: Setup) -> LanguageModel:
    """Full attention in all layers, also beyond the positions of the pretraining."""
    mechanisms = setup.backbone.config.mechanisms
    return set_capacity(replace_config(model, mechanisms=mechanisms), setup.tokens)


def _window(model: LanguageModel, setup: Setup) -> LanguageModel:
    return limit_attention(model, setup.window, setup.sinks)


def _reread(model: LanguageModel, setup: Setup) -> ReReadWindow:
    return ReReadWindow(model, reread=setup.window, segment=setup.window)


def _segments(setup: Setup, updates: int, **changes: Any) -> SegmentStage:
    """Samples of whole windows, `updates` times; adapters in all layers."""
    stage = SegmentStage(
        window=setup.window,
        depth=setup.context // setup.window,
        train="lora",
        dtype=setup.dtype,
        data=setup.data(),
        optimizer=setup.optimizer(),
        step=StepConfig(loss_on="all"),
        loop=setup.loop(updates),
        seed=setup.seed,
    )
    return dataclasses.replace(stage, **changes)


def _tune_full(setup: Setup) -> Stages:
    """Full attention, of which the sample is a window."""
    sample = dict(memory="window", window=setup.context, depth=1)
    return _segments(setup, setup.updates, **sample).stages()


def _tune_reread(setup: Setup) -> Stages:
    stage = _segments(setup, setup.updates, memory="reread", reread=setup.window)
    return stage.stages()


def _tune_hmt(setup: Setup) -> Stages:
    """A quarter of the tokens without retrieval, over two segments; then with it."""
    # As many memories as the longest text has segments; strictly causal, so that
    # every target counts.
    memory = HMTConfig(
        segment_length=setup.window,
        num_memories=-(-setup.tokens // setup.window),
        summary_source="previous",
    )
    alone = dataclasses.replace(memory, retrieval=False)
    short = setup.context // (2 * setup.window)
    first = _segments(setup, short * setup.updates // 4, hmt=alone, depth=2)
    second = _segments(setup, 3 * setup.updates // 4, hmt=memory)
    return HMTStages(first, second).stages()


def _tune_rmt(setup: Setup) -> Stages:
    memory = HMTConfig(
        segment_length=setup.window, num_sensory_tokens=0, retrieval=False
    )
    return _segments(setup, setup.updates, hmt=memory).stages()


def tune_hybrid(
    setup: Setup,
    memory: MemoryName | Literal["none"],
    wider: MemoryHeads | None = None,
    **options: Any,
) -> Stages:
    """Tunes on the texts of a window's row, after a distillation on half of them.

    Adapters learn what kind of documents these are: with fewer updates of them than a
    window has, a memory would lose by that alone. The window is longer by the bytes of
    a memory with `wider` heads.
    """
    steps = 0 if memory == "none" else setup.passes * (setup.updates // 2)
    more = baselines.equal_tokens(setup.backbone, setup.more, wider) if wider else 0
    found = RetrofitStages(
        memory=memory,
        options=MemoryOptions(**options),
        layers=setup.layers,
        window=setup.window,
        sinks=setup.sinks,
        wider=more,
        context_length=setup.context,
        first_adapter=0,
        dtype=setup.dtype,
        passes=setup.passes,
        data=setup.data(),
        distill=PartConfig(setup.optimizer(DISTILLATION_RATE), setup.loop(steps)),
        tune=PartConfig(setup.optimizer(), setup.loop(setup.updates)),
        seed=setup.seed,
    ).stages()
    # In the order of the windows' rows, which have no distillation.
    *before, (folder, tune) = found
    return (*before, (folder, dataclasses.replace(tune, seed=setup.seed)))


class Row(NamedTuple):
    """One row.

    Attributes:
        label: in tables and plots.
        scored: the model that is scored, of the one that was trained, or of the
            backbone where nothing is; None for the trained model itself.
        stages: what is trained; None for nothing.
        cost: of training and reading over that of a window, for the plan.
    """

    label: str
    scored: Callable[[Any, Setup], Any] | None = None
    stages: Callable[[Setup], Stages] | None = None
    cost: float = 1.0


def _memory(label: str, name: MemoryName, **options: Any) -> Row:
    return Row(label, stages=lambda s: tune_hybrid(s, name, **options), cost=1.5)


_SHARED: dict[str, Any] = {"heads": "key_value"}
_TRELLIS: dict[str, Any] = {"slots": 27, "chunk_size": 4}
#: Memories beside the window, in the bytes of 97 of SmolLM2's keys and values in a
#: layer; of 33 where one memory serves the three query heads that share them.
_BESIDE = {
    "elastic-uniform": _memory("Elastic, uniform", "elastic", order=64),
    "elastic-exponential": _memory(
        "Elastic, exponential", "elastic", order=64, sampling="exponential"
    ),
    "lattice": _memory("Lattice", "lattice", slots=38),
    "lattice-width": _memory("Lattice, equal width", "lattice", slots=64),
    "trellis": _memory("Trellis, C = 4", "trellis", **_TRELLIS),
    "trellis-width": _memory("Trellis, equal width", "trellis", slots=64),
    "gated-deltanet": _memory("Gated DeltaNet", "gated_deltanet"),
    "lattice-shared": _memory("Lattice, shared", "lattice", slots=38, **_SHARED),
    "trellis-shared": _memory(
        "Trellis, C = 4, shared", "trellis", **_TRELLIS, **_SHARED
    ),
    "gated-deltanet-shared": _memory(
        "Gated DeltaNet, shared", "gated_deltanet", **_SHARED
    ),
    "infini": _memory("Infini-attention", "infini"),
}
ROWS: dict[str, Row] = {
    "full": Row("full attention, not tuned", full_attention, cost=2.5),
    "window": Row("window, not tuned", _window),
    "wide": Row("wide window, not tuned", wide_window),
    "reread": Row("re-read window, not tuned", _reread, cost=2.2),
    "full-tuned": Row("full attention", full_attention, _tune_full, cost=1.5),
    "window-tuned": Row("window", stages=lambda s: tune_hybrid(s, "none")),
    "wide-tuned": Row("wide window", stages=lambda s: tune_hybrid(s, "none", "query")),
    "wide-shared": Row(
        "wide window of a third, not tuned", lambda m, s: wide_window(m, s, "key_value")
    ),
    "wide-shared-tuned": Row(
        "wide window of a third", stages=lambda s: tune_hybrid(s, "none", "key_value")
    ),
    "wide-shared-longer": Row(
        "wide window of a third, as many updates",
        stages=lambda s: tune_hybrid(
            dataclasses.replace(s, updates=s.updates + s.passes * (s.updates // 2)),
            "none",
            "key_value",
        ),
        cost=4.0,
    ),
    "reread-tuned": Row("re-read window", stages=_tune_reread, cost=2.2),
    **_BESIDE,
    "hmt": Row("HMT", stages=_tune_hmt, cost=1.6),
    "rmt": Row("RMT", stages=_tune_rmt, cost=1.4),
}
