"""How M+ is trained: one stage, or the paper's three; presets.

Stage 1 trains MemoryLLM on short documents, stage 2 on long ones, stage 3 adds the
long-term store and its retriever. Sizes and tasks are those of Wang et al. (2025),
https://arxiv.org/abs/2502.00592, section 3.2.4 and appendix D, and of the published
program; the rates are for the batches given here.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from memjax.checks import check_sizes, require_known
from memjax.data.mplus_tasks.lessons import MPlusTaskConfig
from memjax.models.language_model.config import Dtype
from memjax.models.mplus.state import MPlusConfig
from memjax.models.mplus.tensor_names import RETRIEVERS
from memjax.training.config import LoopConfig
from memjax.training.finetune.config import SampleConfig
from memjax.training.optimizer import OptimizerConfig
from memjax.training.sharding import MeshConfig
from memjax.training.step import StepConfig, check_run


@dataclasses.dataclass(frozen=True)
class MPlusStage:
    """One stage of training M+, whatever the backbone, which stays as it is.

    Attributes:
        memory: sizes; retrieved=0 is MemoryLLM, as in stages 1 and 2.
        tasks: what is trained on, in which proportions.
        facts: JSON lines of clozes (`memjax.data.tasks.facts`) for `tasks.ask`, half
            of whose subjects are told; None is those that ship.
        depth: chunks of a text that is evaluated.
        dtype: of activations; None is the backbone's own.
        data: documents; `mode` must be "chunked".
        optimizer: hyperparameters.
        retriever_documents: of so many documents a new retriever learns, before the
            first step, to find rows that are like the tokens that ask, and the steps go
            on from there (`training/retriever_fit.py`); 0: it is drawn at random.
        retriever_rate: learning rate of the retriever over that of the rest, >= 0.
        position_rate: of `MPlus.position`, likewise. It is added before every layer: a
            step of it is felt as often.
        loop: steps, checkpoints, evaluation, log.
        mesh: devices.
        seed: of new parameters, data order, tasks, and what pools drop.
    """

    memory: MPlusConfig = MPlusConfig()
    tasks: MPlusTaskConfig = MPlusTaskConfig()
    facts: Path | None = None
    depth: int = 8
    dtype: Dtype | None = None
    data: SampleConfig = SampleConfig()
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-4,
        warmup_ratio=0.01,
        final_ratio=0.1,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.0,
    )
    retriever_documents: int = 0
    retriever_rate: float = 1.0
    position_rate: float = 1.0
    loop: LoopConfig = LoopConfig(steps=1000, save_every=100, evaluate_every=200)
    mesh: MeshConfig = MeshConfig()
    seed: int = 42

    def __post_init__(self):
        if self.dtype is not None:
            require_known("dtype", self.dtype, ("float32", "bfloat16"))
        check_sizes(depth=self.depth)
        for name in ("retriever_rate", "position_rate"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        check_run(self.data.mode, StepConfig(), self.seed)
        if self.retriever_documents < 0 or (
            self.retriever_documents and not self.memory.has_retriever
        ):
            raise ValueError(
                "retriever_documents must be at least 0, and 0 without a retriever, "
                f"got {self.retriever_documents}"
            )
        if self.memory.legacy:
            raise ValueError(
                "memory.legacy must be False: its ages do not say which document a "
                "row is of"
            )
        if self.tasks.shortest_chunk > self.memory.chunk:
            raise ValueError(
                f"tasks.shortest_chunk must be at most memory.chunk="
                f"{self.memory.chunk}, got {self.tasks.shortest_chunk}"
            )
        room = (self.memory.pool - 1) // self.memory.tokens
        if not self.memory.retrieved and max(self.tasks.chunks) > room:
            raise ValueError(
                f"tasks.chunks must be at most {room} without a store, whose "
                f"documents are read beside the rest of a pool of {self.memory.pool} "
                f"rows, got {self.tasks.chunks}"
            )

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates over the optimizer's, by the model's attribute."""
        retriever = dict.fromkeys(RETRIEVERS, self.retriever_rate)
        return retriever | {"position": self.position_rate}

    @property
    def context_length(self) -> int:
        """Tokens of a text that is evaluated."""
        return self.depth * self.memory.chunk


@dataclasses.dataclass(frozen=True)
class MPlusStages:
    """The three stages, each from where the one before ended.

    Attributes:
        stage1: MemoryLLM on short documents.
        stage2: MemoryLLM on long ones.
        stage3: M+: with store and retriever.
    """

    stage1: MPlusStage
    stage2: MPlusStage
    stage3: MPlusStage

    def __post_init__(self):
        for name, stage in self.named():
            store = name == "stage3"
            if bool(stage.memory.retrieved) != store:
                raise ValueError(
                    f"{name} must have memory.retrieved {'> 0' if store else '= 0'}, "
                    f"got {stage.memory.retrieved}"
                )

    def named(self) -> Iterator[tuple[str, MPlusStage]]:
        """The stages by their folders."""
        for name in ("stage1", "stage2", "stage3"):
            yield name, getattr(self, name)


def presets() -> dict[str, MPlusStage | MPlusStages]:
    """Trainings by name: in hours on a CPU, and at the paper's sizes."""
    found: dict[str, MPlusStage | MPlusStages] = {}
    for name, stages in (
        ("mplus", _small()),
        ("mplus-smollm2-135m", _smollm2()),
        ("mplus-paper", _paper()),
    ):
        found[name] = stages
        found |= {f"{name}-{part}": stage for part, stage in stages.named()}
    return found


def _stages(
    memory: MPlusConfig, tasks: MPlusTaskConfig, stage: MPlusStage, short: int
) -> MPlusStages:
    """The curriculum around the third stage's memory and tasks.

    Args:
        memory: without store it has as many rows to read: N + R of them in the pool.
        tasks: of stage 3; those before replace what they revisited at once, and take
            the program's share of multi-chunk steps.
        stage: the rest of stage 3.
        short: shortest chunk of stage 1's documents, which have up to four chunks.
    """
    alone = dataclasses.replace(
        memory, retrieved=0, pool=memory.pool + memory.retrieved
    )
    early = dataclasses.replace(tasks, replace=1.0, multi_chunk=0.9)
    shorter = dataclasses.replace(early, chunks=(1, 2, 4), shortest_chunk=short)
    without = lambda tasks: dataclasses.replace(
        stage, memory=alone, tasks=tasks, retriever_documents=0
    )
    return MPlusStages(
        stage1=without(shorter),
        stage2=without(early),
        stage3=dataclasses.replace(stage, memory=memory, tasks=tasks),
    )


def _paper() -> MPlusStages:
    """Sizes and tasks of the paper; stage 1 alone took it four weeks of eight A100."""
    stage = MPlusStage(
        dtype="bfloat16",
        data=SampleConfig(batch_size=8),
        optimizer=dataclasses.replace(MPlusStage().optimizer, learning_rate=3.7e-5),
        loop=LoopConfig(steps=125_000, save_every=2000, evaluate_every=10_000),
    )
    # Documents from 4k to 64k tokens, as far as stage 2's pool has room for them.
    tasks = MPlusTaskConfig(chunks=(8, 16, 32))
    stages = _stages(MPlusConfig(), tasks, stage, 16)
    longer = dataclasses.replace(stage.loop, steps=1_200_000)
    longest = dataclasses.replace(tasks, chunks=(8, 16, 32, 64, 128))
    return dataclasses.replace(
        stages,
        stage1=dataclasses.replace(stages.stage1, loop=longer),
        stage3=dataclasses.replace(stages.stage3, tasks=longest),
    )


def _smollm2() -> MPlusStages:
    """SmolLM2-135M on a CPU: a pool that has forgotten most after some eight chunks."""
    memory = MPlusConfig(
        tokens=128,
        pool=512,
        chunk=256,
        retrieved=512,
        store=4_096,
        stored="input",
        key_dim=64,
    )
    tasks = MPlusTaskConfig(
        full_context=0.0,
        multi_chunk=0.5,
        chunks=(1, 2),
        shortest_chunk=192,
        target=160,
        prompt=24,
        ask=0.6,
    )
    stage = MPlusStage(
        depth=2,
        data=SampleConfig(batch_size=2, validation_texts=4),
        optimizer=dataclasses.replace(
            MPlusStage().optimizer, learning_rate=3e-4, warmup_ratio=0.05
        ),
        retriever_documents=32,
        retriever_rate=0.2,
        position_rate=0.01,
        loop=LoopConfig(steps=240, save_every=40),
    )
    return _stages(memory, tasks, stage, 16)


def _small() -> MPlusStages:
    """All stages in minutes on a CPU, for a backbone of `memjax train`."""
    memory = MPlusConfig(
        tokens=32,
        pool=256,
        chunk=128,
        retrieved=64,
        store=4096,
        key_dim=32,
    )
    tasks = MPlusTaskConfig(chunks=(2, 4, 8), shortest_chunk=96, target=128, prompt=16)
    stage = MPlusStage(
        data=SampleConfig(batch_size=2, validation_texts=4),
        optimizer=dataclasses.replace(MPlusStage().optimizer, learning_rate=5e-4),
        loop=LoopConfig(steps=400, save_every=50, evaluate_every=200),
    )
    return _stages(memory, tasks, stage, 16)
