"""Train the memory of hybrid layers in a pretrained model, in one of two parts.

"distill" trains the new parameters layer by layer towards the backbone's full attention
(`distillation.py`); "tune" trains them with adapters (LoRA) on next-token loss.
Adapters start at the first hybrid layer: earlier layers have no backward pass.
"""

import dataclasses
import re
from typing import Any, Literal, cast, get_args

import jax
from jaxtyping import PRNGKeyArray

from memjax.checks import require_known
from memjax.data import BatchIterator, TokenisedDocument, Tokenizer
from memjax.data.batches.repeated import RepeatedBatches
from memjax.models import LanguageModel, ModelConfig
from memjax.models.adapters import freeze, merge_lora, thaw
from memjax.models.language_model.distillation_init import initialise_from_teacher
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.retrofit import add_memory, check_layers
from memjax.models.language_model.windowed import limit_attention, widen_windows
from memjax.models.lora import LoraConfig, add_lora
from memjax.training.config import DataIterator, LoopConfig
from memjax.training.finetune.distillation import (
    cached,
    make_distillation_steps,
    uncached,
)
from memjax.training.finetune.retrofit_settings import RetrofitSettings
from memjax.training.finetune.stage import Model, SampleStage, Stage
from memjax.training.monitoring.header import say_line
from memjax.training.optimizer import OptimizerConfig
from memjax.training.step import Compile, Step, StepConfig

Part = Literal["distill", "tune"]
#: New parameters: feature maps, memory and gate.
NEW = re.compile(r"\.mechanism\.(features|memory|balance)\.")
#: Parameters of the gate, which weighs the memory's output.
GATE = ("balance/amount", "balance/bias")


#: Settings of one part only, with their values in the other.
OTHERS: dict[Part, dict[str, Any]] = {
    "distill": {"lora": LoraConfig(), "first_adapter": None, "remat": "products"},
    "tune": {"passes": 1},
}


@dataclasses.dataclass(frozen=True)
class RetrofitStage(RetrofitSettings, SampleStage):
    """One part of a retrofit; see `RetrofitSettings` for the other settings.

    Attributes:
        part: "distill" or "tune".
        optimizer: hyperparameters.
        loop: steps, checkpoints, evaluation, log.
    """

    layers: tuple[int, ...] = ()
    passes: int = 1
    part: Part = "tune"
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, weight_decay=0.0)
    loop: LoopConfig = LoopConfig(steps=512, save_every=64)

    def __post_init__(self):
        super().__post_init__()
        require_known("part", self.part, get_args(Part))
        if not self.layers:
            raise ValueError("layers must be at least one, got none")
        if self.part == "distill" and not self.has_new:
            raise ValueError(
                f"part='distill' needs a hybrid of window and memory, got "
                f"memory={self.memory!r} and placement={self.placement!r}"
            )
        for name, default in OTHERS[self.part].items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {default} with part={self.part!r}, "
                    f"got {getattr(self, name)}"
                )
        if self.optimizer.decay_vectors:
            raise ValueError(
                "optimizer.decay_vectors must be False: the gate has no decay"
            )

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages."""
        if self.memory == "none":
            return f"windows of {self.window} with {self.sinks} sinks"
        layers = ", ".join(map(str, self.layers))
        where = f"windows of {self.window} in layers {layers}"
        return f"{self.memory} {self.placement} {where}"

    def wrap(self, backbone: LanguageModel, key: PRNGKeyArray) -> LanguageModel:
        """The backbone with hybrid layers, with the part's parameters trainable."""
        lora_key, memory_key = jax.random.split(key)
        backbone = replace_config(backbone, **self._changes(backbone.config))
        return self._trained(self._with_memory(backbone, memory_key), lora_key)

    def check_start(self, before: Stage, start: str) -> None:
        """Tuning follows the distillation of the same memory in the same layers.

        Raises:
            ValueError: for any other pair.
        """
        if self.part != "tune":
            raise ValueError(f"{start} needs part='tune', got {self.part!r}")
        if not isinstance(before, RetrofitStage) or before.part != "distill":
            raise ValueError(
                f"{start} must be a run of part='distill'; that run has "
                f"{before.memory_name}"
            )
        for name in ("memory", "options", "layers", "window", "sinks", "dtype"):
            old, new = getattr(before, name), getattr(self, name)
            if old != new:
                raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")

    def wrap_trained(
        self, trained: Model, pretrained: ModelConfig, key: PRNGKeyArray
    ) -> LanguageModel:
        """The distilled model, with adapters."""
        lora_key, _ = jax.random.split(key)
        model = merge_lora(cast(LanguageModel, trained))
        changes = self._changes(pretrained)
        return self._trained(replace_config(model, **changes), lora_key)

    def prepare(
        self,
        model: Model,
        pretrained: ModelConfig,
        before: Stage | None,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
    ) -> Model:
        """Initialises the new parameters from statistics of `start_texts` samples."""
        # Distilled parameters must not be initialised again.
        if not (self.has_new and self.start_texts) or before is not None:
            return model
        student = cast(LanguageModel, model)
        texts = self.texts(documents, student.vocab_size, self.start_texts)
        if jax.process_index() == 0:
            say_line("start", f"statistics of {len(texts)} samples")
        return initialise_from_teacher(student, pretrained, texts[:, :-1])

    def batches(
        self,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> DataIterator:
        """Samples of `context_length` tokens; a host's rows of each batch.

        Raises:
            ValueError: if samples are repeated and there are several hosts.
        """
        if self.passes > 1 and shard_count > 1:
            raise ValueError(
                f"passes must be 1 with {shard_count} hosts, got {self.passes}: "
                "each host caches its own samples"
            )
        hosts = {"shard_index": shard_index, "shard_count": shard_count}
        batches = super().batches(documents, tokenizer, vocab_size, **hosts)
        if self.passes == 1:
            return batches
        return RepeatedBatches(
            cast(BatchIterator, batches), -(-self.loop.steps // self.passes)
        )

    @property
    def step(self) -> StepConfig:
        """Without truncation or accumulation, on all targets."""
        return StepConfig()

    @property
    def rates(self) -> dict[str, float]:
        """Learning rate of the gate."""
        return dict.fromkeys(GATE, self.gate_rate)

    def make_step(
        self, model: Model, pretrained: ModelConfig, compiled: Compile
    ) -> Step:
        """One update of all samples of a batch."""
        if self.part == "distill":
            student = cast(LanguageModel, model)
            halves = make_distillation_steps(student, pretrained, self.transform())
            if self.passes == 1:
                return compiled(uncached(*halves))
            return cached(*map(compiled, halves))
        return super().make_step(model, pretrained, compiled)

    def _changes(self, config: ModelConfig) -> dict[str, Any]:
        """Changes to the backbone's configuration."""
        changes: dict[str, Any] = {"dtype": self.dtype or config.dtype}
        if self.remat == "all":
            return changes | {"remat": False}
        return changes | {"remat": True, "remat_saves": self.remat}

    def _with_memory(self, backbone, key):
        if self.memory == "none":
            check_layers(backbone.config, self.layers)
            narrow = limit_attention(backbone, self.window, self.sinks)
            if not self.wider:
                return narrow
            return widen_windows(narrow, self.layers, self.wider)
        return add_memory(
            backbone,
            memory=self.memory,
            layers=self.layers,
            window=self.window,
            sinks=self.sinks,
            placement=self.placement,
            options=self.options,
            key=key,
        )

    def _trained(self, model, key):
        if self.part == "distill":
            fixed = freeze(model)
        else:
            first = self.first_adapter
            first = min(self.layers) if first is None else first
            fixed = add_lora(model, self.lora, key, first_layer=first)
        return thaw(fixed, lambda name: NEW.search(name) is not None)
