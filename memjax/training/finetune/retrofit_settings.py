"""Settings common to both parts of a retrofit."""

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from jaxtyping import Int

from memjax.checks import check_positive, check_sizes, require_known
from memjax.data import TokenisedDocument
from memjax.mechanisms import CELLS
from memjax.models.language_model.config import Dtype, RematSaves
from memjax.models.language_model.retrofit import (
    ELASTIC,
    MemoryName,
    MemoryOptions,
    Placement,
)
from memjax.models.lora import LoraConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune.stage import SampleConfig
from memjax.training.run_data import make_batches
from memjax.training.step import StepConfig, check_run

# One Literal each: a record of a run is read back by its first kind of hint.
Remat = Literal["all", RematSaves]
REMAT = get_args(Remat)
# Names for the command line's choices; type checkers need them written out.
if TYPE_CHECKING:
    Memory = str
else:
    Memory = Literal[MemoryName, "none"]
MEMORIES = (*CELLS, "none")


@dataclasses.dataclass(frozen=True)
class RetrofitSettings:
    """Settings common to both parts of a retrofit.

    Attributes:
        memory: mechanism of the hybrid layers, by name; "none" is the window alone, a
            baseline with the same training.
        options: of the memory; None is the default, one memory head per query head.
        layers: numbers of the hybrid layers; all other attention layers become windows.
        window: tokens that a query sees, its own included.
        sinks: first tokens of the text that it sees in addition.
        wider: additional tokens in the windows of the chosen layers; only for "none",
            as a baseline with the same state size.
        placement: "beside" the window or, Elastic Memory alone, "instead" of it.
        context_length: tokens of a sample, more than the window.
        start_texts: samples for the data-dependent initialisation of new parameters; 0
            for a random one.
        passes: epochs of the distillation. Teacher outputs are computed once and cached
            in host memory: two numbers per token and channel of each hybrid layer.
        gate_rate: learning rate of the gate, relative to the rest; without decay.
        lora: the adapters of the tuning.
        first_adapter: first layer with adapters; None is the first of `layers`.
        dtype: of activations; None is the backbone's own.
        remat: activations of a layer saved for the backward pass of the tuning: "all",
            "products" with weights, inputs of "attention", or its "input" alone, in
            order of memory; the rest is recomputed.
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
    passes: int = 4
    gate_rate: float = 10.0
    lora: LoraConfig = LoraConfig()
    first_adapter: int | None = None
    dtype: Dtype | None = None
    remat: Remat = "products"
    data: SampleConfig = SampleConfig(batch_size=1)
    mesh: MeshConfig = MeshConfig()
    seed: int = 42

    def __post_init__(self):
        require_known("memory", self.memory, MEMORIES)
        require_known("placement", self.placement, get_args(Placement))
        if self.dtype is not None:
            require_known("dtype", self.dtype, get_args(Dtype))
        require_known("remat", self.remat, REMAT)
        check_positive(gate_rate=self.gate_rate)
        for name in ("window", "context_length", "passes"):
            check_sizes(**{name: getattr(self, name)})
        if self.first_adapter is not None:
            check_sizes(least=0, first_adapter=self.first_adapter)
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
        """Whether there are new parameters."""
        return self.memory != "none" and self.placement == "beside"

    def texts(
        self, documents: list[TokenisedDocument], vocab_size: int, count: int
    ) -> Int[np.ndarray, "R T"]:
        """The first training samples, each with the next token."""
        samples = make_batches(
            self.data.mode,
            documents,
            self.context_length,
            1,
            self.seed,
            vocab_size,
            shard_index=0,
            shard_count=1,
        )
        drawn = (next(samples) for _ in range(count))
        whole = [np.concatenate([b.tokens, b.targets[:, -1:]], axis=1) for b in drawn]
        return np.concatenate(whole)
