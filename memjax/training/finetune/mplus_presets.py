"""Presets for training M+: in hours on a CPU, and at the paper's sizes.

Stage 1 trains MemoryLLM on short documents, stage 2 on long ones, stage 3 adds the
long-term store and its retriever. Sizes and tasks are those of Wang et al. (2025),
https://arxiv.org/abs/2502.00592, section 3.2.4 and appendix D, and of the published
program; the rates are for the batches given here.
"""

import dataclasses

from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.training.config import LoopConfig
from memjax.training.finetune.curricula import MPlusStages
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.stage import SampleConfig


def presets() -> dict[str, MPlusStage | MPlusStages]:
    """Training of M+ by name, stages included."""
    found: dict[str, MPlusStage | MPlusStages] = {}
    for name, stages in (
        ("mplus", _small()),
        ("mplus-smollm2-135m", _smollm2()),
        ("mplus-paper", _paper()),
    ):
        found[name] = stages
        found |= {f"{name}-{part}": stage for part, stage in stages.stages()}
    return found


def _stages(
    memory: MPlusConfig, tasks: MPlusTaskConfig, stage: MPlusStage, short: int
) -> MPlusStages:
    """The curriculum around the third stage's memory and tasks.

    Args:
        memory: without store it has as many rows to read: N + R of them in the pool.
        tasks: of stage 3; the others replace a revisited target at once, and have the
            program's share of multi-chunk steps.
        stage: the rest of stage 3.
        short: shortest chunk of stage 1's documents, which have up to four chunks.
    """
    # Without a store the pool is larger, so that reads see as many rows in all stages.
    alone = dataclasses.replace(
        memory, num_retrieved=0, pool_size=memory.pool_size + memory.num_retrieved
    )
    early = dataclasses.replace(tasks, replace=1.0, multi_chunk=0.9)
    shorter = dataclasses.replace(early, chunks=(1, 2, 4), shortest_chunk=short)

    def without(tasks):
        return dataclasses.replace(
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
    stages = _stages(MPlusConfig(), MPlusTaskConfig(), stage, 16)
    longer = dataclasses.replace(stage.loop, steps=1_200_000)
    # Distances of revisits, see `MPlusTaskConfig`: short documents are kept for longer,
    # long ones are renewed.
    first = dataclasses.replace(stages.stage1.tasks, replace=0.2)
    second = dataclasses.replace(stages.stage2.tasks, renew=0.6)
    return dataclasses.replace(
        stages,
        stage1=dataclasses.replace(stages.stage1, tasks=first, loop=longer),
        stage2=dataclasses.replace(stages.stage2, tasks=second),
    )


def _smollm2() -> MPlusStages:
    """SmolLM2-135M on a CPU: a pool that has forgotten most after some eight chunks."""
    memory = MPlusConfig(
        num_memory_tokens=128,
        pool_size=512,
        chunk_size=256,
        num_retrieved=512,
        store_size=4_096,
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
        replace=0.2,
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
    return dataclasses.replace(_stages(memory, tasks, stage, 16), refit=True)


def _small() -> MPlusStages:
    """All stages in minutes on a CPU, for a backbone of `memjax train`."""
    memory = MPlusConfig(
        num_memory_tokens=32,
        pool_size=256,
        chunk_size=128,
        num_retrieved=64,
        store_size=4096,
        key_dim=32,
    )
    tasks = MPlusTaskConfig(
        chunks=(2, 4, 8), shortest_chunk=96, target=128, prompt=16, replace=0.2
    )
    stage = MPlusStage(
        data=SampleConfig(batch_size=2, validation_texts=4),
        optimizer=dataclasses.replace(MPlusStage().optimizer, learning_rate=5e-4),
        loop=LoopConfig(steps=400, save_every=50, evaluate_every=200),
    )
    return _stages(memory, tasks, stage, 16)
