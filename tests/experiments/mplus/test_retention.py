"""The study of knowledge retention, whole and resumed."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.lab import options
from experiments.mplus import adapters, methods, models, retention
from tests.experiments.mplus import tiny


def test_stages_share_the_updates_and_revisit_at_the_papers_distances():
    made = dict(models.stages(61, 1e-3, 5, store=True))
    assert [stage.loop.steps for stage in made.values()] == [20, 20, 21]
    assert all((x.seed, x.optimizer.learning_rate) == (5, 1e-3) for x in made.values())
    assert made["stage1"].tasks.replace == 0.2 and made["stage2"].tasks.renew == 0.6
    without = dict(models.stages(61, 1e-3, 5, store=False))
    assert [*without] == ["stage1", "stage2"]
    assert not any(stage.memory.num_retrieved for stage in without.values())


def test_the_plan_has_each_missing_training_once(tmp_path):
    names = ("M+", "M+, 60 updates", "MemoryLLM", "BM25", "BM25, tuned")
    config = retention.Config(
        (), (1, 2, 3), run_dir=tmp_path, output=tmp_path / "result"
    )
    found = retention.plan(config, names)
    # Two more rates with the first seed.
    trained = ("mplus", "memoryllm", "backbone")
    assert all(found[f"training {x}"] == 5 * retention.MINUTES for x in trained)
    assert found["training M+, 60 updates"] == retention.MINUTES / 4
    asked = [found[f"asking {name}"] / retention.ASKING for name in names]
    assert asked == [3, 1, 3, 1, 3] and len(found) == 4 + len(names)
    rows = {x: {"marks": ["2" * 96]} for x in ("BM25", "M+, seed 1", "M+, seed 3")}
    (tmp_path / "result.json").write_text(json.dumps({"rows": rows}))
    (folder := config.folder("mplus", 1e-3, 2, 240)).mkdir()
    (folder / "spent.json").write_text('{"finished": true}')
    found = retention.plan(config, ("M+", "BM25"))
    assert found == {"asking M+": retention.ASKING, "training mplus": 240}
    # A quarter of the facts, ten times as far: of one seed that was not asked.
    config = dataclasses.replace(config, after=(0, 160), until=24)
    assert retention.plan(config, ("M+",))["asking M+"] == 2.5 * retention.ASKING


@pytest.mark.slow
def test_study_continues_a_row(monkeypatch, tmp_path):
    """Trainings do nothing; the models are tiny and facts are few."""
    found = SimpleNamespace(model=tiny.backbone(), tokenizer=tiny.BYTES)
    tasks = dataclasses.replace(models.stage(3).tasks, shortest_chunk=8)
    stage = dataclasses.replace(models.stage(3), memory=tiny.MEMORY, tasks=tasks)
    sizes = {"SAMPLES": 4, "BATCH": 2, "LENGTHS": 0, "VALIDATION": 2}
    sizes |= {"CHUNK": tiny.CHUNK, "ANSWER": tiny.ANSWER}
    for module, name, value in (
        *((retention, name, value) for name, value in sizes.items()),
        (models, "load_trained", lambda _: (tiny.memory_model(), tiny.BYTES)),
        (models, "load_facts", lambda: tiny.FACTS),
        (models, "with_fitted_retriever", lambda *_: tiny.memory_model(1)),
        (models, "passages", lambda: tiny.PASSAGES),
        (retention.backbones, "smollm2", lambda: Path("tiny")),
        (retention.finetune, "load_backbone", lambda path: found),
        (retention, "train_once", lambda folder, train: None),
        (models, "stage", lambda number: stage),
        (options, "MIN_SEEDS", 1),
        (retention, "RATES", (retention.FIRST,)),
        (adapters, "load", lambda folder: tiny.backbone()),
        (retention.jax, "clear_caches", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)
    only = ("M+", f"M+, {retention.FITTED}", "closed book", "re-read, seconds, tuned")
    given = {"run_dir": tmp_path, "output": tmp_path / "result", "after": (0, 2)}
    config = retention.Config(only, seeds=(3,), until=2, **given)

    def read():
        return json.loads(config.output.with_suffix(".json").read_text())

    retention.main(config)
    first = read()
    assert first["distances"] == [0, 2 * tiny.CHUNK] and len(first["facts"]) == 4
    names = [f"M+, {x}seed 3" for x in ("", "retriever fitted afterwards, ")]
    assert [*first["rows"]] == [*names, "closed book", f"{only[-1]}, seed 3"]
    for row in first["rows"].values():
        assert len(row["marks"][1]) == len(row["query_seconds"]) == 2
    queried = []
    query = methods.LatentMemory.query

    def counted(self, memory, prompt, count):
        queried.append(1)
        return query(self, memory, prompt, count)

    monkeypatch.setattr(methods.LatentMemory, "query", counted)
    retention.main(dataclasses.replace(config, until=0, only=("M+",)))
    # The second batch alone, at two distances.
    assert len(queried) == 2
    rows = read()["rows"]
    assert [len(part) for part in rows["M+, seed 3"]["marks"]] == [4, 4]
    old = first["rows"]["M+, seed 3"]["marks"]
    assert rows["M+, seed 3"]["marks"][0].startswith(old[0])
    assert rows["closed book"] == first["rows"]["closed book"]
    with pytest.raises(ValueError, match="after must be as in .*, got .0, 1."):
        retention.main(dataclasses.replace(config, after=(0, 1)))
    # Two sentences are longer than a chunk of the tiny models.
    config = dataclasses.replace(config, asked="superseded")
    assert config.file == tmp_path / "superseded"
    with pytest.raises(ValueError, match="chunk must be at least .* tokens of the"):
        retention.main(config)
