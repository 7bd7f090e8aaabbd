"""A stage that gives a pretrained model a memory beside the windows of some layers.

"align" trains what is new, layer by layer, towards the full attention of the backbone
(`alignment.py`); "tune" trains it with adapters (LoRA) on the loss of the next token.
Adapters begin at the first chosen layer: the layers before it have no backward pass.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import jax
import numpy as np
import optax
from jaxtyping import Int, PRNGKeyArray

from memjax.checks import check_positive, check_sizes, require_known
from memjax.data import BatchIterator, TokenisedDocument, Tokenizer
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.calibrate import calibrate
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.rebuilt import with_config
from memjax.models.language_model.retrofit import (
    ELASTIC,
    MemoryName,
    MemoryOptions,
    Placement,
    check_layers,
    retrofit,
)
from memjax.models.language_model.windowed import with_wider_windows, with_window
from memjax.models.lora import LoraConfig, add_lora, freeze, merge_lora, thaw
from memjax.training.config import LoopConfig
from memjax.training.finetune.alignment import make_align_step
from memjax.training.finetune.stage import Model, SampleConfig, Stage
from memjax.training.optimizer import OptimizerConfig, optimizer, with_rates
from memjax.training.reporting import print_line
from memjax.training.run_data import make_batches, shortest
from memjax.training.sharding import MeshConfig
from memjax.training.step import (
    StepConfig,
    TrainState,
    check_run,
    init_train_state,
    make_train_step,
)

Part = Literal["align", "tune"]
Memory = MemoryName | Literal["none"]
MEMORIES = (*get_args(MemoryName), "none")
#: Parameters that attention has not: maps, memory and gate.
NEW = re.compile(r"\.mixer\.(features|memory|balance)\.")
#: Those of the gate, which alone decide how far the memory has a part.
GATE = ("balance/amount", "balance/bias")


@dataclasses.dataclass(frozen=True)
class RetrofitSettings:
    """What both parts of the training have in common.

    Attributes:
        memory: beside the window, by its name; "none" is the window alone, as a
            baseline that is trained alike.
        options: of the memory; None is the default, one memory head a query head.
        layers: numbers of the layers with a memory; all other attention layers are
            windows. Adapters begin at the first of them.
        window: tokens that a query sees, its own included.
        sinks: first tokens of the text that it sees beside them.
        wider: tokens by which the windows of the chosen layers are longer than those of
            the others; of "none" alone, as a baseline of as many bytes.
        placement: "beside" the window or, Elastic Memory alone, "instead" of it.
        context_length: tokens of a sample, more than the window.
        start_texts: samples from whose statistics the new parameters start; 0: they
            are drawn at random.
        gate_rate: learning rate of the gate over that of the rest; it has no decay.
        lora: the adapters of the tuning.
        dtype: of activations; None is the backbone's own.
        data: samples; `mode` must be "chunked".
        mesh: devices.
        seed: of new parameters and data order.
    """

    memory: Memory = "lattice"
    options: MemoryOptions = MemoryOptions()
    layers: tuple[int, ...] | Literal["auto"] = ()
    window: int = 256
    sinks: int = 4
    wider: int = 0
    placement: Placement = "beside"
    context_length: int = 2048
    start_texts: int = 8
    gate_rate: float = 10.0
    lora: LoraConfig = LoraConfig()
    dtype: Dtype | None = None
    data: SampleConfig = SampleConfig(batch_size=1)
    mesh: MeshConfig = MeshConfig()
    seed: int = 42

    def __post_init__(self):
        require_known("memory", self.memory, MEMORIES)
        require_known("placement", self.placement, get_args(Placement))
        if self.dtype is not None:
            require_known("dtype", self.dtype, get_args(Dtype))
        check_positive(gate_rate=self.gate_rate)
        check_sizes(window=self.window, context_length=self.context_length)
        if not 0 <= self.sinks <= self.window:
            raise ValueError(
                f"sinks must be in [0, window={self.window}], got {self.sinks}"
            )
        if self.context_length <= self.window + self.sinks:
            raise ValueError(
                f"context_length must be above window + sinks = "
                f"{self.window + self.sinks}, got {self.context_length}"
            )
        if self.start_texts < 0:
            raise ValueError(f"start_texts must be >= 0, got {self.start_texts}")
        if self.placement == "instead" and self.memory != ELASTIC:
            raise ValueError(
                f"placement='instead' needs memory={ELASTIC!r}, got {self.memory!r}"
            )
        if self.memory == "none" and self.options.given:
            raise ValueError(
                f"options must be None with memory='none', got {self.options.given}"
            )
        if self.wider < 0 or (self.wider and self.memory != "none"):
            raise ValueError(
                "wider must be 0, or more with memory='none', got "
                f"{self.wider} with memory={self.memory!r}"
            )
        check_run(self.data.mode, StepConfig(), self.seed)

    @property
    def has_new(self) -> bool:
        """Whether there are parameters that the backbone has not."""
        return self.memory != "none" and self.placement == "beside"

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample."""
        return self.context_length

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        return shortest(self.data.mode, self.context_length)

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages."""
        if self.memory == "none":
            return f"windows of {self.window} with {self.sinks} sinks"
        return f"{self.memory} {self.placement} windows of {self.window}"

    def batches(
        self,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> BatchIterator:
        """Samples of `context_length` tokens; a host's rows of each batch."""
        return make_batches(
            self.data.mode,
            documents,
            self.context_length,
            self.data.batch_size,
            self.seed,
            vocab_size,
            shard_index=shard_index,
            shard_count=shard_count,
        )

    def texts(
        self, documents: list[TokenisedDocument], vocab_size: int, count: int
    ) -> Int[np.ndarray, "R T"]:
        """The first samples of the training, each with the token behind it."""
        one = dataclasses.replace(self.data, batch_size=1)
        batches = dataclasses.replace(self, data=one).batches(
            documents, cast(Tokenizer, None), vocab_size
        )
        drawn = (next(batches) for _ in range(count))
        return np.concatenate(
            [np.concatenate([b.tokens, b.targets[:, -1:]], axis=1) for b in drawn]
        )


@dataclasses.dataclass(frozen=True)
class RetrofitStage(RetrofitSettings):
    """One part of the training; the settings are those of `RetrofitSettings`.

    Attributes:
        part: "align" or "tune".
        optimizer: hyperparameters.
        loop: steps, checkpoints, evaluation, log.
    """

    layers: tuple[int, ...] = ()
    part: Part = "tune"
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, weight_decay=0.0)
    loop: LoopConfig = LoopConfig(steps=512, save_every=64)

    def __post_init__(self):
        super().__post_init__()
        require_known("part", self.part, get_args(Part))
        if not self.layers:
            raise ValueError("layers must be at least one, got none")
        if self.part == "align" and not self.has_new:
            raise ValueError(
                f"part='align' needs a memory beside the window, got "
                f"memory={self.memory!r} and placement={self.placement!r}"
            )
        if self.optimizer.decay_vectors:
            raise ValueError(
                "optimizer.decay_vectors must be False: the gate has no decay"
            )

    def stages(self) -> tuple[tuple[str, "RetrofitStage"], ...]:
        """This stage alone, in the run's own folder."""
        return (("", self),)

    def wrap(self, backbone: LanguageModel, key: PRNGKeyArray) -> LanguageModel:
        """The backbone with its memories, of which the part's share is trained."""
        lora_key, memory_key = jax.random.split(key)
        if self.dtype is not None:
            backbone = with_config(backbone, dtype=self.dtype)
        return self._trained(self._with_memory(backbone, memory_key), lora_key)

    def check_start(self, before: Stage, start: str) -> None:
        """Tuning follows the alignment of the same memory in the same layers.

        Raises:
            ValueError: for any other pair.
        """
        if self.part != "tune":
            raise ValueError(f"{start} needs part='tune', got {self.part!r}")
        if not isinstance(before, RetrofitStage) or before.part != "align":
            raise ValueError(
                f"{start} must be a run of part='align'; that run has "
                f"{before.memory_name}"
            )
        for name in ("memory", "options", "layers", "window", "sinks", "dtype"):
            old, new = getattr(before, name), getattr(self, name)
            if old != new:
                raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")

    def wrap_trained(
        self, trained: Model, pretrained: ModelConfig, key: PRNGKeyArray
    ) -> LanguageModel:
        """The aligned model, with adapters."""
        lora_key, _ = jax.random.split(key)
        return self._trained(merge_lora(cast(LanguageModel, trained)), lora_key)

    def prepare(
        self,
        model: Model,
        pretrained: ModelConfig,
        before: Stage | None,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
    ) -> Model:
        """With `start_texts`, what is new starts from the backbone's statistics."""
        # What was aligned before must not be started again.
        if not (self.has_new and self.start_texts) or before is not None:
            return model
        student = cast(LanguageModel, model)
        texts = self.texts(documents, student.vocab_size, self.start_texts)
        if jax.process_index() == 0:
            print_line(f"{'start':<11} statistics of {len(texts)} samples")
        return calibrate(student, pretrained, texts[:, :-1])

    def transform(self) -> optax.GradientTransformation:
        """The optimizer, with the gate's own learning rate."""
        rates = dict.fromkeys(GATE, self.gate_rate)
        return with_rates(optimizer(self.optimizer, self.loop.steps), rates)

    def first_state(self, model: Model, key: PRNGKeyArray) -> TrainState:
        """The state before the first step; no random numbers are drawn."""
        rows = self.data.batch_size
        return init_train_state(model, self.transform(), StepConfig(), rows)

    def make_step(
        self,
        model: Model,
        pretrained: ModelConfig,
        compiled: Callable[[Callable], Callable],
    ) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]:
        """One update of all samples of a batch."""
        if self.part == "align":
            student = cast(LanguageModel, model)
            return compiled(make_align_step(student, pretrained, self.transform()))
        return compiled(make_train_step(model, self.transform(), StepConfig()))

    def _with_memory(self, backbone, key):
        if self.memory == "none":
            check_layers(backbone.config, self.layers)
            narrow = with_window(backbone, self.window, self.sinks)
            if not self.wider:
                return narrow
            return with_wider_windows(narrow, self.layers, self.wider)
        return retrofit(
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
        if self.part == "align":
            fixed = freeze(model)
        else:
            fixed = add_lora(model, self.lora, key, first_layer=min(self.layers))
        return thaw(fixed, lambda name: NEW.search(name) is not None)
