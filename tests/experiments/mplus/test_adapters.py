"""Adapters are trained on M+'s tasks as texts: the texts, resuming, loading."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.mplus import adapters, models
from memjax.data import TokenisedDocument
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig, Target, TaskBatch
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.training import LoopConfig, launch
from memjax.training.finetune import finetune, start
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.stage import SampleConfig
from tests.experiments.mplus.tiny import BYTES, MEMORY, backbone

CHUNK, TARGET = 8, 6
TASKS = MPlusTaskConfig(
    full_context=0.0,
    revisit=0.5,
    multi_chunk=0.5,
    repeat=0.0,
    chunks=(1, 2),
    shortest_chunk=CHUNK - 2,
    target=TARGET,
    prompt=2,
)
STAGE = MPlusStage(
    memory=dataclasses.replace(MEMORY, chunk_size=CHUNK, min_chunk_size=4),
    tasks=TASKS,
    data=SampleConfig(batch_size=2),
    loop=LoopConfig(steps=6, save_every=2, writers=()),
)
DOCUMENTS = [
    TokenisedDocument(f"{i}", "text", np.arange(i, i + 200, dtype=np.int32) % 251)
    for i in range(4)
]


def tasks():
    return TaskBatches(DOCUMENTS, TASKS, CHUNK, 2, 0, np.zeros(0, np.int32))


def test_chunks_and_target_are_one_text():
    target = np.array([[11, 12, 13]], np.int32)
    task = TaskBatch(
        chunks=np.array([[[1, 2, 0], [3, 4, 5]]], np.int32),
        lengths=np.array([[2, 3]], np.int32),
        target=Target(target, target + 1, np.array([[0, 1, 1]], np.float32)),
        num_queries=np.array([1], np.int32),
        keep=np.array([False]),
    )
    text = adapters.as_text(task)
    assert text.tokens.tolist() == [[1, 2, 3, 4, 5, 11, 12, 13, 0]]
    assert text.targets.tolist() == [[2, 3, 4, 5, 11, 12, 13, 14, 0]]
    assert text.mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0]]


def test_texts_follow_the_tasks_and_resume():
    drawn, found = tasks(), adapters.TaskTexts(tasks())
    earlier, revisits = None, 0
    for step in range(12):
        again = adapters.TaskTexts(tasks())
        again.set_state(json.loads(json.dumps(found.get_state())))
        task, batch = next(drawn)
        text = next(found)
        jax.tree.map(np.testing.assert_array_equal, next(again), text)
        if task == "revisit":
            revisits += 1
            assert earlier is not None, step
            jax.tree.map(np.testing.assert_array_equal, text, earlier)
            continue
        jax.tree.map(np.testing.assert_array_equal, text, adapters.as_text(batch))
        earlier = text if batch.keep.all() else earlier
    assert revisits


@pytest.mark.slow
def test_adapters_are_trained_and_loaded(monkeypatch, tmp_path):
    plain = backbone()
    stored = start.StoredText("bytes", TextInterface(BYTES), BYTES, {})
    found = start.Backbone(plain, stored, start.digest(plain), "")
    monkeypatch.setattr(models, "stage", lambda number: STAGE)
    monkeypatch.setattr(launch, "load_sources", lambda *given: [DOCUMENTS])
    monkeypatch.setattr(start, "load_backbone", lambda path: found)
    given, read_by = [], adapters.TaskTexts.__next__

    def drawn(self):
        given.append(read_by(self))
        return given[-1]

    monkeypatch.setattr(adapters.TaskTexts, "__next__", drawn)
    stage = adapters.stage(1e-2, 7, 6)
    assert finetune.finetune(stage, "any", tmp_path / "run").step == 6
    # Documents and order of M+'s stage, by the seed of this one.
    other = dataclasses.replace(STAGE, seed=7).batches(DOCUMENTS, BYTES, 256)
    for text, wanted in zip(given[:], adapters.TaskTexts(other), strict=False):
        jax.tree.map(np.testing.assert_array_equal, text, wanted)
    model = adapters.load(tmp_path / "run")
    np.testing.assert_array_equal(
        plain.embedding.get_value(), model.embedding.get_value()
    )
    read = jax.jit(lambda model, tokens: model(model.init_state(2), tokens)[1])
    own, tuned = (read(m, given[0].tokens) for m in (plain, model))
    assert np.abs(own - tuned).max() > 1e-3
