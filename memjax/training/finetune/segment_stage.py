"""A stage that reads samples of whole segments: HMT, RMT, or a baseline.

The default optimizer is that of the official HMT program: AdamW with a constant rate,
weight decay on everything, gradients clipped at 1. He et al. (2025),
https://arxiv.org/abs/2405.06067, section 4.
"""

import dataclasses
from typing import Literal, cast, get_args

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.checks import check_sizes, require_known
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT, add_hmt
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.language_model.windowed import limit_attention
from memjax.models.lora import LoraConfig, add_lora
from memjax.training.config import LoopConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune.stage import (
    NO_MEMORY,
    Model,
    SampleConfig,
    SampleStage,
    Stage,
)
from memjax.training.optimizer import OptimizerConfig
from memjax.training.step import StepConfig, check_run

Memory = Literal["hmt", "window", "reread", "none"]
Trained = Literal["full", "lora"]
WITH_RETRIEVAL, WITHOUT_RETRIEVAL = "HMT with retrieval", "HMT without retrieval"
REREAD = "the last tokens, read again"


@dataclasses.dataclass(frozen=True)
class SegmentStage(SampleStage):
    """One stage of fine-tuning on samples of `depth` segments, whatever the backbone.

    Attributes:
        memory: "hmt", of which RMT is the form without sensory tokens and retrieval;
            "window", the backbone alone with windowed attention;
            "reread", the backbone on the last tokens and each segment, see
            `ReReadWindow`; "none", the backbone as it is, with the memories and the
            attention of its own.
        hmt: the memory; `hmt.retrieval` False is stage 1.
        window: the segment of the baselines. With memory="window" the tokens that
            attention sees; with the others those of a segment.
        sinks: first tokens that attention sees in addition; for "window" only.
        reread: tokens that are read again before each segment, for "reread" only; 0
            reads segments independently.
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
        scan_layers: run equal layers of the backbone by one loop, whatever its own
            configuration says: a deep one compiles in a small part of the time, and a
            step holds their parameters once more.
    """

    memory: Memory = "hmt"
    hmt: HMTConfig = HMTConfig()
    window: int = 1024
    sinks: int = 0
    reread: int = 0
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
    scan_layers: bool = False

    def __post_init__(self):
        require_known("memory", self.memory, get_args(Memory))
        require_known("train", self.train, get_args(Trained))
        if self.dtype is not None:
            require_known("dtype", self.dtype, get_args(Dtype))
        check_sizes(window=self.window, depth=self.depth)
        for name, of in (("sinks", "window"), ("reread", "reread")):
            value = getattr(self, name)
            if value < 0 or (value and self.memory != of):
                raise ValueError(
                    f"{name} must be 0, or more with memory={of!r}, got {value} with "
                    f"memory={self.memory!r}"
                )
        check_run(self.data.mode, self.step, self.seed)

    @property
    def segment(self) -> int:
        """Tokens of a segment, the unit of `depth`."""
        return self.hmt.segment_length if self.memory == "hmt" else self.window

    @property
    def context_length(self) -> int:
        """Tokens of a sample."""
        return self.depth * self.segment

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages."""
        match self.memory:
            case "window" | "none":
                return NO_MEMORY
            case "reread":
                return REREAD
        return WITH_RETRIEVAL if self.hmt.retrieval else WITHOUT_RETRIEVAL

    def summary(self) -> tuple[str, str]:
        """The memory and its sizes, for a list of presets."""
        match self.memory:
            case "window":
                sinks = f", {self.sinks} sinks" if self.sinks else ""
                return "none: a window", f"window {self.window:,}{sinks}"
            case "reread":
                sizes = f"{self.reread:,} before segments of {self.window:,}"
                return "none: the last tokens again", sizes
            case "none":
                return "none: as it is", f"segments of {self.window:,}"
        hmt, bank = self.hmt, ""
        name = "HMT, stage 1" if hmt.num_sensory_tokens else "RMT"
        if hmt.retrieval:
            name, bank = "HMT, stage 2", f", bank {hmt.num_memories:,}"
        trained = ", LoRA" if self.train == "lora" else ""
        return name, f"segments of {self.segment:,}{bank}{trained}"

    def wrap(self, backbone: LanguageModel, key: PRNGKeyArray) -> Model:
        """The backbone with its memory or window, and with adapters if any."""
        # Always two keys: the same initial memory with and without adapters.
        lora_key, memory_key = jax.random.split(key)
        if self.dtype is not None:
            backbone = replace_config(backbone, dtype=self.dtype)
        if self.scan_layers:
            backbone = replace_config(backbone, scan_layers=True)
        if self.memory == "window":
            backbone = _limited(backbone, self.window, self.sinks)
        if self.train == "lora":
            backbone = add_lora(backbone, self.lora, lora_key)
        match self.memory:
            case "window" | "none":
                return backbone
            case "reread":
                return ReReadWindow(backbone, reread=self.reread, segment=self.window)
        return add_hmt(backbone, self.hmt, key=memory_key)

    def check_start(self, before: Stage, start: str) -> None:
        """Stage 2 follows stage 1: HMT with retrieval one without.

        Raises:
            ValueError: for any other pair, or other trained parameters.
        """
        if self.memory_name != WITH_RETRIEVAL:
            raise ValueError(
                f"{start} needs memory='hmt' and hmt.retrieval=True, got "
                f"memory={self.memory!r} and {self.hmt.retrieval}"
            )
        if before.memory_name != WITHOUT_RETRIEVAL:
            raise ValueError(
                f"{start} must be a run of stage 1, {WITHOUT_RETRIEVAL}; "
                f"that run has {before.memory_name}"
            )
        # No other kind of stage has that name.
        before = cast(SegmentStage, before)
        for name in ("train", "lora"):
            old, new = getattr(before, name), getattr(self, name)
            if old != new:
                raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")

    def wrap_trained(
        self, trained: Model, pretrained: ModelConfig, key: PRNGKeyArray
    ) -> HMT:
        """A new memory on stage 1's backbone, with its first memory M_init."""
        stage1 = cast(HMT, trained)
        _, memory_key = jax.random.split(key)
        # The backbone as it came: stage 1's has caches of its segments' length.
        backbone = replace_config(
            stage1.backbone,
            mechanisms=pretrained.mechanisms,
            remat=pretrained.remat,
            dtype=self.dtype or pretrained.dtype,
            scan_layers=self.scan_layers or pretrained.scan_layers,
        )
        graph, variables = nnx.split(add_hmt(backbone, self.hmt, key=memory_key))
        # Parameters of the retrieval are new; M_init was learned in stage 1.
        kept = {"initial_memory": nnx.state(stage1)["initial_memory"]}
        return nnx.merge(graph, nnx.State({**variables, **kept}))


def _limited(backbone: LanguageModel, window: int, sinks: int) -> LanguageModel:
    """Attention in windows; a backbone without attention stays as it is."""
    if any(m.attention for m in backbone.config.mechanisms):
        return limit_attention(backbone, window, sinks)
    if sinks:
        raise ValueError(f"sinks must be 0 without attention layers, got {sinks}")
    return backbone
