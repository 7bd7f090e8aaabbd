"""Adapters are trained on M+'s tasks as texts: the texts, resuming, loading."""

import json

import jax
import numpy as np
import pytest

from experiments.mplus import adapters, models
from memjax.data import TokenisedDocument, load_tokenizer
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig, Target, TaskBatch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.training import LoopConfig
from memjax.training.checkpoints.folder import FORMAT, FORMAT_FILE
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import FinetuneRun
from memjax.training.finetune.stage import SampleConfig

BYTES = load_tokenizer("bytes")
CHUNK, TARGET = 8, 6
MEMORY = MPlusConfig(
    num_memory_tokens=4,
    pool_size=16,
    chunk_size=CHUNK,
    min_chunk_size=4,
    num_retrieved=4,
    store_size=16,
    rank=2,
)
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
    memory=MEMORY,
    tasks=TASKS,
    data=SampleConfig(source="none", batch_size=2),
    loop=LoopConfig(steps=6, save_every=2),
)
CONFIG = ModelConfig(
    mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=64),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
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
    monkeypatch.setattr(models, "stage", lambda preset, number: STAGE)
    monkeypatch.setattr(adapters, "load_tokens", lambda *given: DOCUMENTS)
    backbone = LanguageModel(CONFIG, key=jax.random.key(0))
    before = jax.tree.map(np.asarray, backbone.embedding.get_value())
    tuning = adapters.Tuning(
        preset="one",
        learning_rate=1e-2,
        seed=7,
        updates=6,
        backbone="tiny",
        backbone_digest=adapters.finetune.digest(backbone),
        rank=2,
        alpha=4.0,
    )
    assert adapters.train(tuning, backbone, BYTES, tmp_path / "run").step == 6
    model = adapters.load(tmp_path / "run", backbone)
    np.testing.assert_array_equal(backbone.embedding.get_value(), before)
    text = next(adapters.TaskTexts(tasks()))
    read = jax.jit(lambda model, tokens: model(model.init_state(2), tokens)[1])
    own, tuned = (read(m, text.tokens) for m in (backbone, model))
    assert np.abs(own - tuned).max() > 1e-3
    recipe = adapters.recipe(tmp_path / "run")
    assert recipe[0]["updates"] == 6 and recipe[0]["seed"] == 7
    said = models.recipe_text(recipe)
    assert "6 updates of 2 texts, learning rate 0.01, LoRA rank 2, seed 7" in said
    with pytest.raises(ValueError, match="must be of the same backbone"):
        adapters.load(tmp_path / "run", LanguageModel(CONFIG, key=jax.random.key(1)))


def test_recipe_is_of_the_newest_stage(monkeypatch, tmp_path):
    for i, name in enumerate(("stage2", "stage3")):
        checkpoints = tmp_path / name / "checkpoints"
        (checkpoints / f"{(i + 1) * 2}").mkdir(parents=True)
        (checkpoints / FORMAT_FILE).write_text(json.dumps(FORMAT))
    run = FinetuneRun(STAGE, CONFIG, "bytes", "", "", "digest", "hub/tiny")
    monkeypatch.setattr(models, "read_run", lambda folder: run)
    (found,) = models.recipe(tmp_path)
    assert found["trained"] == "M+" and found["stage"] == "stage3"
    assert found["updates"] == 4 and found["target_tokens"] == 4 * 2 * TARGET
    (tmp_path / "alone").mkdir()
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        models.recipe(tmp_path / "alone")
