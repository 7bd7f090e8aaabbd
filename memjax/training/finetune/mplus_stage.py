"""A stage of training M+ or, without a store, MemoryLLM; the backbone is frozen.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.2 and appendix D.
"""

import dataclasses
import math
from pathlib import Path
from typing import cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.checks import check_sizes, require_known
from memjax.data import TokenisedDocument, Tokenizer, load_facts, read_questions
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, FactTexts, split_facts
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints.tensor_names import RETRIEVERS
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.training.config import LoopConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune.stage import Model, SampleConfig, SampleStage, Stage
from memjax.training.mplus.retriever_fit import collect, start_by_similarity
from memjax.training.mplus.step import init_task_state, make_task_steps
from memjax.training.optimizer import OptimizerConfig
from memjax.training.run_data import shortest
from memjax.training.step import Compile, Step, StepConfig, TrainState, check_run

MPLUS = "M+"
#: Start of a target that repeats the chunks before it.
INSTRUCTION = "Repeat:"
# Per document in a bank: chunks, query tokens, and rows of a layer.
CHUNKS, ASKING, ROWS = 2, 48, 64


@dataclasses.dataclass(frozen=True)
class MPlusStage(SampleStage):
    """One stage of training M+ on a frozen backbone.

    Attributes:
        memory: sizes; num_retrieved=0 is MemoryLLM, as in stages 1 and 2.
        tasks: training tasks and their proportions.
        facts: JSON lines of clozes (`memjax.data.tasks.facts`) for `tasks.ask`, with
            half of the subjects for training; None is the embedded ones.
        depth: chunks of a text that is evaluated.
        dtype: of activations; None is the backbone's own.
        data: documents; `mode` must be "chunked".
        optimizer: hyperparameters.
        retriever_documents: number of documents to initialise a new retriever by
            similarity (`training/mplus/retriever_fit.py`); 0 for a random one.
        refit_retriever: initialise so, too, one that the start has trained.
        retriever_rate: learning rate of the retriever, relative to the rest, >= 0.
        position_rate: that of `MPlus.position`, which is added before every layer.
        loop: steps, checkpoints, evaluation, log.
        mesh: devices.
        seed: of new parameters, data order, tasks, and drops from pools.
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
    refit_retriever: bool = False
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
        if self.refit_retriever and not self.retriever_documents:
            raise ValueError("refit_retriever=True needs retriever_documents, got 0")
        if self.memory.legacy:
            raise ValueError(
                "memory.legacy must be False: its ages do not say which document a "
                "row is of"
            )
        if self.tasks.shortest_chunk > self.memory.chunk_size:
            raise ValueError(
                f"tasks.shortest_chunk must be at most memory.chunk_size="
                f"{self.memory.chunk_size}, got {self.tasks.shortest_chunk}"
            )

    @property
    def context_length(self) -> int:
        """Tokens of a text that is evaluated."""
        return self.depth * self.memory.chunk_size

    @property
    def tokens_read(self) -> int:
        """Tokens of a target."""
        return self.tasks.target

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that a task of the fewest chunks reads."""
        least = min(self.tasks.chunks) * self.memory.chunk_size + self.tasks.target
        return shortest("chunked", least)

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages."""
        return MPLUS

    def summary(self) -> tuple[str, str]:
        """The memory and its sizes, for a list of presets."""
        memory, name, store = self.memory, "MemoryLLM", ""
        if memory.num_retrieved:
            name = "M+, a new retriever" if self.refit_retriever else "M+, stage 3"
            store = f", store {memory.store_size:,}"
        per_chunk = f"{memory.num_memory_tokens:,} tokens per {memory.chunk_size:,}"
        return name, f"{per_chunk}, pool {memory.pool_size:,}{store}"

    def wrap(self, backbone: LanguageModel, key: PRNGKeyArray) -> MPlus:
        """The frozen backbone with a new memory."""
        _, memory_key = jax.random.split(key)
        if self.dtype is not None:
            backbone = replace_config(backbone, dtype=self.dtype)
        return add_mplus(backbone, self.memory, key=memory_key)

    def check_start(self, before: Stage, start: str) -> None:
        """A stage of M+ follows any other with parameters of the same sizes.

        Raises:
            ValueError: if that run has no M+, or one of other sizes.
        """
        if before.memory_name != MPLUS:
            raise ValueError(
                f"{start} must be a run of M+ or MemoryLLM; that run has "
                f"{before.memory_name}"
            )
        # No other kind of stage has that name.
        learned = cast(MPlusStage, before).memory
        fixed = ["num_memory_tokens", "stored", "rank", "alpha"]
        if learned.has_retriever and self.memory.has_retriever:
            # A retriever that is new may have any width.
            fixed.append("key_dim")
        for name in fixed:
            old, new = getattr(learned, name), getattr(self.memory, name)
            if old != new:
                raise ValueError(
                    f"memory.{name}={new} must be that of the start, {old}"
                )

    def wrap_trained(
        self, trained: Model, pretrained: ModelConfig, key: PRNGKeyArray
    ) -> MPlus:
        """All parameters of the previous stage; a missing retriever is new."""
        before = cast(MPlus, trained)
        # A new model has parameters that this stage adds, such as a retriever.
        graph, fresh = nnx.split(self.wrap(before.backbone, key))
        learned = nnx.state(before, nnx.Param)
        kept = {name: value for name, value in learned.items() if name in fresh}
        return nnx.merge(graph, nnx.State({**fresh, **kept}))

    def prepare(
        self,
        model: Model,
        pretrained: ModelConfig,
        before: Stage | None,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
    ) -> Model:
        """Initialises a retriever by similarity, with `retriever_documents`."""
        learned = before is not None and cast(MPlusStage, before).memory.has_retriever
        # A trained retriever must not be initialised again unasked.
        if not self.retriever_documents or (learned and not self.refit_retriever):
            return model
        return self.fit_retriever(cast(MPlus, model), documents, tokenizer)

    def refitted(self) -> "MPlusStage":
        """The stage after this one that fits the retriever anew and trains nothing."""
        return dataclasses.replace(
            self,
            refit_retriever=True,
            # A run has an update: at this rate it moves no parameter.
            optimizer=dataclasses.replace(self.optimizer, learning_rate=1e-12),
            loop=dataclasses.replace(self.loop, steps=1),
        )

    def fit_retriever(
        self, model: MPlus, documents: list[TokenisedDocument], tokenizer: Tokenizer
    ) -> MPlus:
        """The model with a retriever by similarity to `retriever_documents`.

        The same on every host.

        Args:
            model: of this stage, with a retriever.
            documents: of the training split; whole batches of them are read.
            tokenizer: of the run.
        """
        memory, tasks = self.memory, self.tasks
        chunks = min(CHUNKS, memory.pool_size // memory.num_memory_tokens)
        tasks = dataclasses.replace(
            tasks,
            # All batches must have the same number of chunks, which multi_chunk alone
            # writes.
            full_context=0.0,
            revisit=0.0,
            multi_chunk=1.0,
            repeat=0.0,
            chunks=(chunks,),
        )
        stage = dataclasses.replace(self, tasks=tasks)
        drawn = stage.batches(documents, tokenizer, model.vocab_size)
        asking = min(ASKING, tasks.target)
        batches = []
        for _ in range(-(-self.retriever_documents // self.data.batch_size)):
            batch = next(drawn).batch
            batches.append(
                batch._replace(num_queries=np.minimum(batch.num_queries, asking))
            )
        # A small memory makes fewer rows than the bank would take.
        rows = min(ROWS, chunks * memory.num_memory_tokens)
        bank = collect(model, batches, asking, rows, jax.random.key(self.seed))
        return start_by_similarity(model, bank)

    def batches(
        self,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> TaskBatches:
        """Tasks and their batches; a host's rows of each."""
        facts = None
        if self.tasks.ask:
            found = load_facts() if self.facts is None else read_questions(self.facts)
            told, _ = split_facts(found, seed=FACTS_SEED)
            facts = FactTexts(
                told, tokenizer, self.memory.chunk_size, self.tasks.target
            )
        return TaskBatches(
            documents,
            self.tasks,
            self.memory.chunk_size,
            self.data.batch_size,
            self.seed,
            tokenizer.encode(INSTRUCTION),
            shard_index=shard_index,
            shard_count=shard_count,
            vocab_size=vocab_size,
            facts=facts,
        )

    @property
    def step(self) -> StepConfig:
        """Without truncation or accumulation, on all targets."""
        return StepConfig()

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates of retriever and position."""
        retriever = dict.fromkeys(RETRIEVERS, self.retriever_rate)
        return retriever | {"position": self.position_rate}

    def first_state(self, model: Model, key: PRNGKeyArray) -> TrainState:
        """The state before the first step, with an empty memory.

        `key` is of the drops from the pools.
        """
        rows, target = self.data.batch_size, self.tasks.target
        model = cast(MPlus, model)
        return init_task_state(model, self.transform(), rows, target, key)

    def make_step(
        self, model: Model, pretrained: ModelConfig, compiled: Compile
    ) -> Step:
        """One update on the task of a step, with a program per task."""
        transform, prompt = self.transform(), self.tasks.prompt
        updates = make_task_steps(cast(MPlus, model), transform, prompt)
        # Tasks differ in shapes and reads: one program would compute all.
        programs = {task: compiled(update) for task, update in updates.items()}
        return lambda state, assigned: programs[assigned.task](state, assigned.batch)
