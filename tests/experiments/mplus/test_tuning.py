"""Baselines of retention are trained on M+'s lessons: what they are, and resuming."""

import dataclasses
import functools
import json
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tyro

from experiments.mplus import adapters as tuning
from experiments.mplus import recipe
from experiments.mplus.retention import everything
from experiments.mplus.retention.config import Config as RetentionConfig
from experiments.mplus.tuned.lessons import Lessons, as_text
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
C, T = 8, 6
MEMORY = MPlusConfig(
    num_memory_tokens=4,
    pool_size=16,
    chunk_size=C,
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
    shortest_chunk=C - 2,
    target=T,
    prompt=2,
)
STAGE = MPlusStage(
    memory=MEMORY,
    tasks=TASKS,
    data=SampleConfig(source="none", batch_size=2),
    loop=LoopConfig(steps=6),
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


def stream(seed=0):
    return TaskBatches(DOCUMENTS, TASKS, C, 2, seed, np.zeros(0, np.int32))


def lessons(first=5):
    return Lessons([(stream(), first), (stream(1), 3)])


def test_chunks_and_target_are_one_text():
    target = np.array([[11, 12, 13]], np.int32)
    lesson = TaskBatch(
        chunks=np.array([[[1, 2, 0], [3, 4, 5]]], np.int32),
        lengths=np.array([[2, 3]], np.int32),
        target=Target(target, target + 1, np.array([[0, 1, 1]], np.float32)),
        num_queries=np.array([1], np.int32),
        keep=np.array([False]),
    )
    text = as_text(lesson)
    assert text.tokens.tolist() == [[1, 2, 3, 4, 5, 11, 12, 13, 0]]
    assert text.targets.tolist() == [[2, 3, 4, 5, 11, 12, 13, 14, 0]]
    assert text.mask.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0]]


def test_lessons_are_mplus_tasks_in_their_order():
    first, second, found = stream(), stream(1), lessons()
    kept, revisits = None, 0
    for step in range(12):
        kept = None if step == 5 else kept
        task, drawn = next(first if step < 5 else second)
        batch = next(found)
        if task == "revisit":
            revisits += 1
            assert kept is not None
            jax.tree.map(np.testing.assert_array_equal, batch, kept)
            continue
        jax.tree.map(np.testing.assert_array_equal, batch, as_text(drawn))
        kept = batch if drawn.keep.all() else kept
    assert revisits


def test_lessons_go_on_from_a_position():
    for read in (3, 5, 7):
        found, again = lessons(), lessons()
        for _ in range(read):
            next(found)
        again.set_state(found.get_state())
        for _ in range(6):
            jax.tree.map(np.testing.assert_array_equal, next(found), next(again))
    with pytest.raises(ValueError, match="must be of 1 stages, got 2"):
        Lessons([(stream(), 5)]).set_state(lessons().get_state())


def settings(**changes: Any) -> tuning.Tuning:
    given: dict[str, Any] = dict(
        preset="one",
        learning_rate=1e-2,
        rank=2,
        alpha=4.0,
        seed=7,
        updates=6,
        backbone="tiny",
        backbone_digest="",
    )
    return tuning.Tuning(**given | changes)


@functools.cache
def backbone():
    return LanguageModel(CONFIG, key=jax.random.key(0))


@pytest.mark.slow
def test_adapters_are_trained_and_read_back(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "presets", lambda: {"one": STAGE})
    monkeypatch.setattr(tuning, "load_tokens", lambda *args: DOCUMENTS)
    digest = tuning.finetune.digest(backbone())
    made = settings(backbone_digest=digest)
    before = jax.tree.map(np.asarray, backbone().embedding.get_value())

    def train(folder, updates):
        # Stopped in the middle, and then to the end.
        stopped = dataclasses.replace(made, updates=updates)
        return tuning.train(stopped, backbone(), BYTES, folder, 2)

    assert train(tmp_path / "run", 6).step == 6
    model, seed = tuning.load(tmp_path / "run", backbone())
    assert seed == 7
    np.testing.assert_array_equal(backbone().embedding.get_value(), before)
    text = next(lessons())
    read = jax.jit(lambda model, tokens: model(model.init_state(2), tokens)[1])
    own, tuned = (read(m, text.tokens) for m in (backbone(), model))
    assert np.abs(own - tuned).max() > 1e-3
    (said,) = tuning.recipe(tmp_path / "run")
    assert said["updates"] == 6 and said["seed"] == 7 and said["learning_rate"] == 1e-2
    assert "6 updates of 2 texts, learning rate 0.01, LoRA rank 2, seed 7" in (
        recipe.in_words([said])
    )
    with pytest.raises(ValueError, match="must be of the same backbone"):
        other = LanguageModel(CONFIG, key=jax.random.key(1))
        tuning.load(tmp_path / "run", other)


def test_a_recipe_names_every_stage(monkeypatch, tmp_path):
    runs = {}
    for i, name in enumerate(("stage1", "stage2", "stage3")):
        checkpoints = tmp_path / name / "checkpoints"
        (checkpoints / f"{(i + 1) * 2}").mkdir(parents=True)
        (checkpoints / FORMAT_FILE).write_text(json.dumps(FORMAT))
        alone = dataclasses.replace(MEMORY, num_retrieved=0)
        stage = STAGE if i == 2 else dataclasses.replace(STAGE, memory=alone)
        start = "digest" if i else ""
        runs[name] = FinetuneRun(stage, CONFIG, "bytes", "", "", start, "hub/tiny")
    monkeypatch.setattr(recipe, "read_run", lambda folder: runs[folder.name])
    # The folder of all stages stands for the last.
    for folder in (tmp_path, tmp_path / "stage3"):
        found = recipe.recipe(folder)
        assert [x["trained"] for x in found] == ["MemoryLLM", "MemoryLLM", "M+"]
        assert [x["updates"] for x in found] == [2, 4, 6]
        assert found[2]["target_tokens"] == 6 * 2 * T and found[2]["of_updates"] == 6
    (first,) = recipe.recipe(tmp_path / "stage1")
    assert first["stage"] == "stage1" and first["seed"] == STAGE.seed
    (tmp_path / "alone").mkdir()
    runs["alone"] = dataclasses.replace(runs["stage3"], start_digest="")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        recipe.recipe(tmp_path / "alone")


def test_every_command_is_understood_and_the_better_rate_is_taken(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(everything.backbones, "smollm2", lambda: tmp_path)
    output = tmp_path / "results" / "retention"
    config = everything.Config(
        run_dir=tmp_path, seeds=(3,), learning_rates=(1e-4, 1e-3, 2e-3), output=output
    )
    everything.main(dataclasses.replace(config, dry=True))
    said = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    # M+, MemoryLLM, three rates and their validation, rows without adapters and with.
    assert len(said) == 2 + 3 + 3 + 2
    programs = {"tuning": tuning.Config, "knowledge_retention": RetentionConfig}
    for module, *arguments in said[2:]:
        found = tyro.cli(programs[module.rpartition(".")[2]], args=arguments)
        if module.endswith("tuning"):
            assert found.updates == config.updates and found.seed == 3
    marks = (["20", "00"], ["22", "10"], ["22", "01"])
    for i, part in enumerate(marks):
        row = dict(method="full attention", tuned=True, seed=3, label="", recipe=[])
        row |= {"kept_bytes": [], "marks": part}
        facts = [{"subject": "a"}, {"subject": "b"}]
        result = {"facts": facts, "distances": [0, 4], "rows": {"one": row}}
        file = everything.chosen_by(config, 3, i)
        file.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{file}.json").write_text(json.dumps(result))
    # The last two are equal: the lower rate.
    assert everything.best(config, 3) == 1
