"""How the rows of the comparison at equal bytes are tuned: on equal texts, by adapters.

Adapters have one rank, and learning rates are chosen from the same. A memory beside a
window, and the windows that it is compared with, have adapters from the first chosen
layer on; the others in all layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from experiments.lab import baselines
from experiments.lab.measure import state_bytes
from memjax.checks import check_sizes
from memjax.models import LanguageModel
from memjax.models.hmt.config import HMTConfig
from memjax.models.language_model.retrofit import MemoryHeads, MemoryName, MemoryOptions
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training.finetune.curricula import HMTStages, MPlusStages
from memjax.training.finetune.mplus_presets import presets as mplus_presets
from memjax.training.finetune.retrofit_stages import PartConfig, RetrofitStages
from memjax.training.finetune.run import AnyStage
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import StepConfig

Stages = tuple[tuple[str, AnyStage], ...]
NO_OPTIONS = MemoryOptions()
#: Of the layer-wise distillation, which has no adapters: its rate, and its passes.
ALIGNMENT_RATE, PASSES = 5e-3, 6
#: Memory tokens that a chunk of M+ becomes.
MPLUS_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the rows have in common.

    Attributes:
        window: tokens that an attention layer sees.
        sinks: first tokens that it sees beside them.
        layers: that have a memory, or a wider window.
        more: tokens of keys and values that a memory's bytes come to in a layer, if
            each query head has one.
        context: tokens of a training sample, a multiple of the window.
        tokens: of the longest text that is read.
    """

    window: int
    sinks: int
    layers: tuple[int, ...]
    more: int
    context: int
    tokens: int

    def __post_init__(self):
        check_sizes(window=self.window, more=self.more, context=self.context)
        if self.context % self.window:
            raise ValueError(
                f"context must be a multiple of window={self.window}, "
                f"got {self.context}"
            )


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a row is trained.

    Attributes:
        source: of the documents.
        updates: of one text of `Sizes.context` tokens each, in all stages together but
            an alignment, which sees half of the texts before.
        rate: learning rate, of the adapters and of what is new.
        seed: of new parameters and data order.
    """

    source: str
    updates: int
    rate: float
    seed: int

    def data(self) -> SampleConfig:
        """One text an update."""
        return SampleConfig(self.source, batch_size=1, validation_texts=4)

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
    model: LanguageModel, sizes: Sizes, heads: MemoryHeads = "query"
) -> LanguageModel:
    """Windows that are longer by a memory's bytes in the chosen layers."""
    more = baselines.equal_tokens(model, sizes.more, heads)
    return baselines.wide_window(model, sizes.window, sizes.sinks, sizes.layers, more)


def _segments(
    tuning: Tuning, sizes: Sizes, updates: int, **changes: Any
) -> SegmentStage:
    """Samples of whole windows, `updates` times; adapters in all layers."""
    stage = SegmentStage(
        window=sizes.window,
        depth=sizes.context // sizes.window,
        train="lora",
        dtype="float32",
        data=tuning.data(),
        optimizer=tuning.optimizer(),
        step=StepConfig(loss_on="all"),
        loop=tuning.loop(updates),
        seed=tuning.seed,
    )
    return dataclasses.replace(stage, **changes)


def tune_full(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
    """Full attention, of which the sample is a window."""
    whole = dict(memory="window", window=sizes.context, depth=1)
    return _segments(tuning, sizes, tuning.updates, **whole).stages()


def tune_reread(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
    """The last window read again before each segment of as many tokens."""
    again = dict(memory="reread", reread=sizes.window)
    return _segments(tuning, sizes, tuning.updates, **again).stages()


def tune_hmt(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
    """A quarter of the tokens without retrieval, over two segments; then with it."""
    # As many memories as the longest text has segments; strictly causal, so that
    # every target counts.
    memory = HMTConfig(
        segment_length=sizes.window,
        num_memories=-(-sizes.tokens // sizes.window),
        summary_source="previous",
    )
    alone = dataclasses.replace(memory, retrieval=False)
    short = sizes.context // (2 * sizes.window)
    first = _segments(tuning, sizes, short * tuning.updates // 4, hmt=alone, depth=2)
    second = _segments(tuning, sizes, 3 * tuning.updates // 4, hmt=memory)
    return HMTStages(first, second).stages()


def tune_rmt(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
    """A memory token carried from segment to segment."""
    memory = HMTConfig(
        segment_length=sizes.window, num_sensory_tokens=0, retrieval=False
    )
    return _segments(tuning, sizes, tuning.updates, hmt=memory).stages()


def tune_beside(
    memory: MemoryName | Literal["none"],
    options: MemoryOptions = NO_OPTIONS,
    wider: MemoryHeads | None = None,
) -> Callable[[LanguageModel, Sizes, Tuning], Stages]:
    """Tunes on the texts of a window's row, after half of them aligned the layers.

    Adapters learn what kind of documents these are: with fewer updates of them than a
    window has, a memory would lose by that alone.

    Args:
        memory: beside the window; "none" is the window alone.
        options: of the memory.
        wider: the heads of the memory whose bytes the window has in addition.
    """

    def stages(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
        align = 0 if memory == "none" else tuning.updates // 2
        found = RetrofitStages(
            memory=memory,
            options=options,
            layers=sizes.layers,
            window=sizes.window,
            sinks=sizes.sinks,
            wider=baselines.equal_tokens(backbone, sizes.more, wider) if wider else 0,
            context_length=sizes.context,
            dtype="float32",
            passes=PASSES,
            data=tuning.data(),
            distill=PartConfig(
                tuning.optimizer(ALIGNMENT_RATE), tuning.loop(PASSES * align)
            ),
            tune=PartConfig(tuning.optimizer(), tuning.loop(tuning.updates)),
            seed=tuning.seed,
        ).stages()
        # In the order of the windows' rows, which have no alignment.
        *before, (folder, tune) = found
        return (*before, (folder, dataclasses.replace(tune, seed=tuning.seed)))

    return stages


def tune_mplus(
    store: bool,
) -> Callable[[LanguageModel, Sizes, Tuning], Stages]:
    """All stages of M+, or the first two, which are MemoryLLM's, on the documents."""

    def stages(backbone: LanguageModel, sizes: Sizes, tuning: Tuning) -> Stages:
        curriculum = mplus_presets()["mplus-smollm2-135m"]
        assert isinstance(curriculum, MPlusStages)
        chosen = curriculum.stages()[: 3 if store else 2]
        memory = mplus_memory(backbone, sizes, store)
        found = []
        for name, stage in chosen:
            own, counts = memory, stage.tasks.chunks
            if not stage.memory.num_retrieved:
                # Reads see as many rows with the store and without.
                pool = memory.pool_size + memory.num_retrieved
                own = dataclasses.replace(memory, num_retrieved=0, pool_size=pool)
                # A pool must have a row that is not of the document.
                counts = tuple(n for n in counts if n * own.num_memory_tokens < pool)
            # Two texts an update, each of some chunks and a target.
            chunks = sum(counts) / len(counts)
            read = 2 * (chunks * memory.chunk_size + stage.tasks.target)
            steps = tuning.updates * sizes.context / read / len(chosen)
            changed = dataclasses.replace(
                stage,
                memory=own,
                tasks=dataclasses.replace(
                    stage.tasks,
                    ask=0.0,
                    chunks=counts,
                    shortest_chunk=3 * memory.chunk_size // 4,
                ),
                data=dataclasses.replace(tuning.data(), batch_size=2),
                optimizer=tuning.optimizer(),
                loop=tuning.loop(round(steps)),
                seed=tuning.seed,
            )
            found.append((name, changed))
        return tuple(found)

    return stages


def mplus_memory(backbone: LanguageModel, sizes: Sizes, store: bool) -> MPlusConfig:
    """Sizes whose bytes come nearest to those of the wide window, and not above.

    Raises:
        ValueError: if the smallest memory has more.
    """
    target = state_bytes(wide_window(backbone, sizes), sizes.tokens)

    def memory(rows: int) -> MPlusConfig:
        size = MPLUS_TOKENS * rows
        return MPlusConfig(
            num_memory_tokens=MPLUS_TOKENS,
            pool_size=size,
            # A chunk that is not complete is kept in all layers, and counts: half a
            # window would leave room for the rows of a single chunk.
            chunk_size=sizes.window // 4,
            stored="input",
            key_dim=64,
            num_retrieved=size if store else 0,
            store_size=size if store else MPlusConfig.store_size,
        )

    def size(rows: int) -> int:
        model = add_mplus(backbone, memory(rows), key=jax.random.key(0))
        return state_bytes(model, sizes.tokens)

    # Without a store a document is read beside a row of another.
    least = 1 if store else 2
    smallest, next_size = size(least), size(least + 1)
    if smallest > target:
        raise ValueError(
            f"M+ keeps at least {smallest:,} bytes, the wide window {target:,}"
        )
    return memory(least + (target - smallest) // (next_size - smallest))
