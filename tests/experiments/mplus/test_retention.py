"""The study of knowledge retention, whole and resumed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from experiments.mplus import adapters, methods, models, retention, retriever
from tests.experiments.mplus.tiny import (
    ANSWER,
    BYTES,
    CHUNK,
    FACTS,
    MEMORY,
    PASSAGES,
    backbone,
    memory_model,
)

CONFIG = retention.Config(
    only=("M+", f"M+, {retention.FITTED}", "closed book", "closed book, tuned"),
    seeds=(3,),
    rates=(1e-3, 1e-2),
    samples=4,
    until=2,
    batch=2,
    lengths=0,
    after=(0, 2),
    chunk=CHUNK,
    answer=ANSWER,
)


@pytest.fixture(name="config")
def _config(monkeypatch, tmp_path):
    """Trainings do nothing; the models are tiny and facts are few."""
    found = SimpleNamespace(
        model=backbone(), tokenizer=BYTES, origin="tiny", digest="digest"
    )
    stage = models.stage("mplus", 3)
    tasks = dataclasses.replace(stage.tasks, shortest_chunk=8)
    stage = dataclasses.replace(stage, memory=MEMORY, tasks=tasks)
    loaded = (memory_model(), BYTES)
    for module, name, value in (
        (retention.finetune, "load_backbone", lambda path: found),
        (retention, "train_once", lambda folder, train: None),
        (retention, "VALIDATION_FACTS", 2),
        (retention, "VALIDATION_AFTER", (0, 1)),
        (models, "stage", lambda preset, number: stage),
        (models, "load_trained", lambda name, folder: loaded),
        (models, "load_facts_of", lambda split: FACTS),
        (models, "passages", lambda: PASSAGES),
        (models, "recipe", lambda folder: []),
        (adapters, "load", lambda folder, model: model),
        (adapters, "recipe", lambda folder: []),
        (retriever, "main", lambda config: None),
        (retriever, "read", lambda model, file: model),
    ):
        monkeypatch.setattr(module, name, value)
    return dataclasses.replace(
        CONFIG, run_dir=tmp_path / "runs", output=tmp_path / "result"
    )


def read(config):
    return json.loads(config.output.with_suffix(".json").read_text())


@pytest.mark.slow
def test_study_continues_a_row(config, monkeypatch, capsys):
    retention.main(config)
    first = read(config)
    assert first["distances"] == [0, 2 * CHUNK] and len(first["facts"]) == 4
    names = [f"M+, {x}seed 3" for x in ("", "retriever fitted afterwards, ")]
    assert [*first["rows"]] == [*names, "closed book", "closed book, tuned, seed 3"]
    assert all(len(row["marks"][1]) == 2 for row in first["rows"].values())
    chosen = json.loads((config.run_dir / "tuned-rate.json").read_text())
    # Both are as good: the lower rate.
    assert chosen["rate"] == 1e-3 and len(chosen["validation"]) == 2
    queried = []
    query = methods.LatentMemory.query

    def counted(self, memory, prompt, count):
        queried.append(1)
        return query(self, memory, prompt, count)

    monkeypatch.setattr(methods.LatentMemory, "query", counted)
    whole = dataclasses.replace(config, until=0, only=("M+",))
    retention.main(whole)
    # The second batch alone, at two distances.
    assert len(queried) == 2
    rows = read(config)["rows"]
    assert [len(part) for part in rows["M+, seed 3"]["marks"]] == [4, 4]
    old = first["rows"]["M+, seed 3"]["marks"]
    assert rows["M+, seed 3"]["marks"][0].startswith(old[0])
    assert rows["closed book"] == first["rows"]["closed book"]
    assert config.output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "most frequent answer" in capsys.readouterr().out
    with pytest.raises(ValueError, match="answer=7 must be that of the rows in"):
        retention.main(dataclasses.replace(whole, answer=7))
    with pytest.raises(ValueError, match="after=.* must be that of the rows in"):
        retention.main(dataclasses.replace(whole, after=(0, 3)))
    monkeypatch.setattr(models, "recipe", lambda folder: [recipe])
    recipe = {"updates": 1, "learning_rate": 1.0, "seed": 3}
    longer = dataclasses.replace(config, until=2, only=("M+",))
    monkeypatch.setattr(retention.Study, "read", lambda self: first)
    first["rows"]["M+, seed 3"]["marks"] = ["", ""]
    with pytest.raises(ValueError, match="'M., seed 3' in .* is of another model"):
        retention.main(longer)


def test_settings_out_of_range_are_refused():
    for changes, message in (
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"after": (2, 1)}, r"after must rise from 0 or more, got \(2, 1\)"),
        ({"after": (-1, 1)}, "after must rise from 0 or more"),
        ({"until": 3}, "until must be a multiple of batch=2, got 3"),
        ({"rates": ()}, "rates must be positive"),
        ({"only": ("LRU",)}, "only=.*LRU.* must be among"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)
