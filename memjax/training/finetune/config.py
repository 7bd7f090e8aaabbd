"""How a backbone is fine-tuned: one stage, or the two stages of HMT; presets.

Sizes, steps and learning rates of the presets are those of He et al. (2025),
https://arxiv.org/abs/2405.06067, Table 7 and section 4; AdamW as in the official
program: a constant rate, weight decay on everything, gradients clipped at 1.
"""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from memjax.checks import check_sizes, require_known
from memjax.models.hmt.model import HMTConfig
from memjax.models.language_model.config import Dtype
from memjax.models.lora import LoraConfig
from memjax.training.config import LoopConfig
from memjax.training.optimizer import OptimizerConfig
from memjax.training.sharding import MeshConfig
from memjax.training.step import StepConfig, check_run

Memory = Literal["hmt", "window"]
Trained = Literal["full", "lora"]


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """What is read; a row is `depth` segments long.

    Attributes:
        source: "embedded", "folder:PATH", "tfds:NAME" or "hf:NAME".
        mode: "chunked" samples are independent, as in the paper; "streamed" ones go on
            with the memory of the sample before, with `step.carry_memory`.
        batch_size: samples of one update, over all devices.
        validation_texts: samples in each evaluation.
        cache_dir: where tokens are kept; None is the user's cache folder.
    """

    source: str = "embedded"
    mode: Literal["chunked", "streamed"] = "chunked"
    batch_size: int = 2
    validation_texts: int = 16
    cache_dir: Path | None = None

    def __post_init__(self):
        require_known("mode", self.mode, ("chunked", "streamed"))
        check_sizes(batch_size=self.batch_size, validation_texts=self.validation_texts)


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """One stage of fine-tuning, whatever the backbone.

    Attributes:
        memory: "hmt", of which RMT is the form without sensory tokens and retrieval;
            "window", the backbone alone, whose attention sees the last tokens.
        hmt: the memory; `hmt.retrieval` False is stage 1.
        window: tokens that attention sees with memory="window": its segment.
        depth: segments of a sample, through which gradients flow (BPTT) unless
            `step.bptt_blocks` cuts them.
        train: "full" trains the backbone's every parameter; "lora" adapters alone. The
            memory's parameters are always trained.
        lora: the adapters.
        dtype: of activations; None is the backbone's own.
        data: samples.
        optimizer: hyperparameters.
        step: truncation, accumulation, loss; "last" counts each sample's last segment.
        loop: steps, checkpoints, evaluation, log.
        mesh: devices.
        seed: of new parameters and data order.
    """

    memory: Memory = "hmt"
    hmt: HMTConfig = HMTConfig()
    window: int = 1024
    depth: int = 2
    train: Trained = "full"
    lora: LoraConfig = LoraConfig()
    dtype: Dtype | None = None
    data: SampleConfig = SampleConfig()
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-5,
        warmup_ratio=0.0,
        final_ratio=1.0,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.01,
        decay_vectors=True,
    )
    step: StepConfig = StepConfig(loss_on="last")
    loop: LoopConfig = LoopConfig(steps=500, save_every=100, evaluate_every=100)
    mesh: MeshConfig = MeshConfig()
    seed: int = 42

    def __post_init__(self):
        require_known("memory", self.memory, get_args(Memory))
        require_known("train", self.train, get_args(Trained))
        if self.dtype is not None:
            require_known("dtype", self.dtype, get_args(Dtype))
        check_sizes(window=self.window, depth=self.depth)
        check_run(self.data.mode, self.step, self.seed)

    @property
    def segment(self) -> int:
        """Tokens of a segment, the unit of `depth`."""
        return self.hmt.segment if self.memory == "hmt" else self.window

    @property
    def context_length(self) -> int:
        """Tokens of a sample."""
        return self.depth * self.segment


@dataclasses.dataclass(frozen=True)
class TwoStageConfig:
    """HMT's training: first the recurrence over few segments, then the retrieval.

    Attributes:
        stage1: without retrieval.
        stage2: with retrieval; starts from stage 1's backbone and first memory.
    """

    stage1: FinetuneConfig
    stage2: FinetuneConfig

    def __post_init__(self):
        for name, stage, retrieval in (
            ("stage1", self.stage1, False),
            ("stage2", self.stage2, True),
        ):
            if stage.memory != "hmt" or stage.hmt.retrieval != retrieval:
                raise ValueError(
                    f"{name} must have memory='hmt' and hmt.retrieval={retrieval}, got "
                    f"memory={stage.memory!r} and {stage.hmt.retrieval}"
                )


class PaperSize(NamedTuple):
    """A row of Table 7; d_h follows from the paper's counts of extra parameters."""

    segment: int
    depth: int
    memories: int
    retrieval_dim: int | None
    learning_rate: float
    train: Trained


PAPER_SIZES = {
    "opt-350m": PaperSize(1024, 15, 300, 1536, 1e-5, "full"),
    "smollm-135m": PaperSize(1024, 15, 300, 1536, 1e-5, "full"),
    "opt-2.7b": PaperSize(512, 8, 300, 2560, 1e-5, "full"),
    "openllama-3b": PaperSize(512, 8, 300, 2048, 1e-5, "full"),
    "rwkv-3b": PaperSize(256, 5, 400, 2560, 1e-5, "full"),
    "mamba-370m": PaperSize(256, 6, 400, 2048, 1e-4, "lora"),
    "llama2-7b": PaperSize(256, 8, 400, 4096, 1e-4, "lora"),
    "yi-6b": PaperSize(512, 3, 300, 4096, 2e-4, "lora"),
    "mistral-7b": PaperSize(512, 3, 300, 4096, 2e-4, "lora"),
}


def presets() -> dict[str, FinetuneConfig | TwoStageConfig]:
    """Fine-tunings by name; those named after a model are the paper's for it."""
    two = _paper(PaperSize(1024, 15, 300, None, 1e-5, "full"), None)
    longer = dataclasses.replace(two.stage1.loop, steps=700)
    rmt = dataclasses.replace(
        two.stage1,
        hmt=dataclasses.replace(two.stage1.hmt, sensory=0),
        loop=longer,
    )
    named: dict[str, FinetuneConfig | TwoStageConfig] = {
        "hmt-tiny": _tiny(),
        "hmt": two,
        "hmt-stage1": two.stage1,
        "hmt-stage2": two.stage2,
        "rmt": rmt,
        "window": dataclasses.replace(rmt, memory="window"),
    }
    return named | {
        f"hmt-{name}": _paper(size, "bfloat16") for name, size in PAPER_SIZES.items()
    }


def _paper(size: PaperSize, dtype: Dtype | None) -> TwoStageConfig:
    """Stage 1: two segments, 200 steps. Stage 2: all segments, 500 steps."""
    memory = HMTConfig(
        segment=size.segment,
        memories=size.memories,
        retrieval_dim=size.retrieval_dim,
        retrieval=False,
    )
    default = FinetuneConfig()
    stage1 = FinetuneConfig(
        hmt=memory,
        train=size.train,
        dtype=dtype,
        optimizer=dataclasses.replace(
            default.optimizer, learning_rate=size.learning_rate
        ),
        loop=dataclasses.replace(default.loop, steps=200),
    )
    stage2 = dataclasses.replace(
        stage1,
        hmt=dataclasses.replace(memory, retrieval=True),
        depth=size.depth,
        loop=default.loop,
    )
    return TwoStageConfig(stage1, stage2)


def _tiny() -> TwoStageConfig:
    """Both stages in minutes on a CPU, for a backbone of `memjax train`.

    Every scored target counts, and the rate falls to 0: so few short steps would only
    blur a backbone otherwise.
    """
    two = _paper(PaperSize(64, 4, 16, None, 1e-3, "full"), None)
    rate = dataclasses.replace(two.stage1.optimizer, warmup_ratio=0.05, final_ratio=0.0)
    shrunk = []
    for stage, steps in ((two.stage1, 100), (two.stage2, 300)):
        loop = LoopConfig(steps=steps, save_every=50, evaluate_every=100)
        shrunk.append(
            dataclasses.replace(
                stage,
                hmt=dataclasses.replace(stage.hmt, sensory=8),
                window=64,
                data=SampleConfig(batch_size=8, validation_texts=8),
                optimizer=rate,
                step=StepConfig(loss_on="scored"),
                loop=loop,
            )
        )
    return TwoStageConfig(*shrunk)
