"""Small models: equal sizes, fair data, rates chosen on validation, runs resumed."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.lab.results import arranged
from experiments.memories import mqar, recall, recall_tables, small_models, text
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run
from memjax.training.distributed import sharding

SCALE = small_models.Scale(1, 32, 2, 4, 48, 48 * 4, 2, 1e-3)
TASK = mqar.Task(SCALE, 48, 12, pairs=(2, 6), tested=(2, 16), lengths=(48, 64))


@pytest.fixture(name="tiny")
def _tiny(monkeypatch):
    monkeypatch.setattr(mqar, "SMALL", TASK)


def config_of(folder, *only, test_rows=2, **more):
    more |= {"run_dir": folder / "runs", "output": folder}
    return recall.Config(only=only, test_rows=test_rows, **more)


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_recall_trains_complete_rows_and_resumes(tiny, tmp_path, capsys, monkeypatch):
    """Both columns of a model that they share; each rate has its neighbours tried."""
    config = config_of(tmp_path, "DeltaNet", seeds=(0, 1, 2))
    recall.main(config)
    report = json.loads((tmp_path / "recall.json").read_text())
    found = [(row["column"], row["seed"]) for row in report["rows"]]
    assert found == [(c, seed) for c in ("width", "bytes") for seed in (0, 1, 2)]
    for row in report["rows"]:
        tests = [(48, 2), (64, 2), (64, 16)]
        assert [(s["length"], s["pairs"]) for s in row["scores"]] == tests
        # Two updates teach next to nothing.
        assert all(0 <= score["tokens"] <= 0.5 for score in row["scores"])
        tried, rate = row["tried"], f"{row['learning_rate']:g}"
        assert tried[rate] == min(tried.values())
        assert rate not in (min(tried, key=float), max(tried, key=float))
    first, other = report["rows"][0], report["rows"][3]
    assert first | {"column": "bytes"} == other
    loss = 1 - np.mean(first["validation"])
    assert first["tried"][f"{first['learning_rate']:g}"] == loss
    trained = []
    monkeypatch.setattr(mqar, "measure", lambda *a: trained.append(a))
    recall.main(config)
    assert not trained
    recall.main(dataclasses.replace(config, seeds=(0, 1, 3), plan=True))
    assert "1 trainings: 2 minutes\n1 missing" in capsys.readouterr().out
    recall.main(dataclasses.replace(config, columns=("bytes",)))
    assert json.loads((tmp_path / "recall.json").read_text())["rows"] == report["rows"]


@pytest.mark.slow
def test_contexts_stand_beside_those_of_the_paper(tmp_path, monkeypatch):
    scale = text.SCALE._replace(layers=1, model_dim=8, slots=4, steps=1)
    scales = (scale._replace(context_length=128), scale._replace(model_dim=16))
    study = recall.STUDIES["contexts"]._replace(scales=scales)
    monkeypatch.setitem(recall.STUDIES, "contexts", study)
    short = [x._replace(tokens=x.tokens[:257]) for x in text._validation()]
    patched = dict(SCALE=scale, _validation=lambda: short, ngrams=dict)
    for name, value in patched.items():
        monkeypatch.setattr(text, name, value)
    made = config_of(tmp_path, "DeltaNet", of="contexts", seeds=(0, 1, 2), test_rows=64)
    recall.main(made)
    report = json.loads((tmp_path / "contexts.json").read_text())
    rows = arranged(recall_tables.by_context.rows(report), "")
    assert [row[1:3] for row in rows.rows] == [["128", "8"], ["256", "16"]]
    assert [row[-1] for row in rows.rows] == ["20.21", ""]
    assert "DeltaNet in the paper" in rows.notes[0]
    model = small_models.base_model(scale, 256, "deltanet", 1)
    with pytest.raises(ValueError, match="context_length must be at most 256"):
        text.measure(model, 1.0, 0, scale._replace(context_length=4096))


def test_a_training_that_diverges_did_not_learn(tiny, tmp_path, monkeypatch):
    def measure(task, model, rate, seed, rows):
        if rate > 1e-2:
            raise FloatingPointError("2 updates were not finite, and skipped")
        return {"validation": [0.5, 0.1], "scores": []}

    monkeypatch.setattr(mqar, "measure", measure)
    case = next(x for x in recall.cases("recall") if x.column == "bytes")
    rows = recall.train_row(config_of(tmp_path), case)
    assert {row["learning_rate"] for row in rows} == {1e-2}
    assert rows[0]["tried"]["0.03"] is None


def test_rows_show_the_seeds_that_learned():
    def run(seed, column, share, **more):
        scores = [{"pairs": n, "length": 64, "tokens": share} for n in TASK.tested]
        about = {"name": "a", "seed": seed, "column": column, "task": "recall"}
        sizes = {"width": 4, "state_bytes": 1000}
        return about | sizes | {"validation": [share, 0], "scores": scores} | more

    runs = [run(seed, "width", share) for seed, share in enumerate((0.5, 0.4, 0.9))]
    diverged = {"name": "b", "column": "bytes", "task": "recall", "diverged": "x"}
    runs += [diverged | {"width": 3, "state_bytes": 900}] * 3
    config = {"of": "recall", "columns": ["width", "bytes"]}
    result = {"rows": runs, "task": TASK._asdict(), "config": config}
    found = recall_tables.both_columns.rows(result)
    rows = [row for row in found if isinstance(row, dict)]
    # A row that is in one column alone.
    names = [(row["right answers"], row["equal"], row["learned"]) for row in rows]
    assert names == [("a", "width", "2 of 3"), ("b", "bytes", "0 of 3")]
    assert rows[0]["16 pairs"] == "0.70 (0.50 to 0.90)"
    assert rows[1]["state bytes"] == "900"


def test_examples_depend_on_seed_and_step_alone():
    first, again, other = (mqar.batch(TASK, 3, step) for step in (1, 1, 2))
    np.testing.assert_array_equal(again.tokens, first.tokens)
    assert not np.array_equal(again.tokens, other.tokens)
    # Rows of 2 and 6 pairs in equal numbers.
    counts, rows = np.unique(np.asarray(again.mask).sum(axis=1), return_counts=True)
    assert counts.tolist() == [2, 6] and set(rows) == {2}
    one, other = (mqar.sequences(TASK, seed, 2, 2, 48) for seed in (1, 2))
    assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.slow
def test_updates_on_the_device_equal_those_of_the_training_loop():
    wide = mqar.of_width(TASK, "deltanet", 16)
    model = small_models.equal_parameters(wide, TASK.scale)
    scale = TASK.scale
    settings = run.RunConfig(
        model,
        run.DataConfig("embedded", context_length=48, batch_size=4),
        OptimizerConfig(
            learning_rate=scale.learning_rate,
            warmup_ratio=scale.warmup,
            final_ratio=0.1,
        ),
        loop=LoopConfig(steps=scale.steps),
        seed=3,
    )
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    for i in range(scale.steps):
        state, _ = step(state, mqar.batch(TASK, 3, i))
    found, _ = small_models.train(scale, model, 3, mqar.batch, TASK)
    for a, b in zip(leaves(found), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("study", recall.STUDIES)
def test_models_have_equal_parameters_and_widths_or_states(study):
    made = recall.cases(study)
    assert len(set(made)) == len(made)
    for task, scale in {(case.task, case.scale) for case in made}:
        some = [case for case in made if (case.task, case.scale) == (task, scale)]
        counts = [small_models.parameters(case.model) for case in some]
        # One hidden unit of the feed-forward layers more or less.
        assert max(counts) - min(counts) <= 3 * 2 * some[0].model.model_dim
        width = 16 if task == "recall" else scale.model_dim // scale.heads
        for case in some:
            (mechanism,) = case.model.mechanisms
            own = {
                getattr(mechanism, name, width)
                for name in ("slots", "key_dim", "value_dim")
            }
            if case.column == "width":
                apart = {"half the width": width // 2}.get(case.name, width)
                assert case.name == "Transformer++" or own == {apart}
    budget = mqar.budget(mqar.SMALL)
    for case in made:
        if case.column == "bytes":
            assert abs(small_models.state_bytes(case.model) / budget - 1) < 0.1
    model = mqar.of_width(mqar.SMALL, "gsa", 16)
    state = jax.eval_shape(lambda: run.abstract_model(model).init_state(1))
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert small_models.state_bytes(model) == kept


def test_sizes_that_cannot_be_made_equal_are_refused():
    with pytest.raises(ValueError, match="bytes of one entry, got 100"):
        mqar.of_bytes(mqar.SMALL, "deltanet", 100)
    # An open chunk of 64 tokens grows in steps of more than a thousand bytes.
    with pytest.raises(ValueError, match="no size has a state within 10% of 9500 by"):
        mqar.of_bytes(mqar.SMALL, "trellis", 9_500, chunk_size=64)
    with pytest.raises(ValueError, match="attention keeps all tokens"):
        mqar.of_bytes(mqar.SMALL, "attention", 10_000)
    with pytest.raises(ValueError, match="width must be 16 for attention"):
        mqar.of_width(mqar.SMALL, "attention", 8)
    wide = mqar.of_width(mqar.SMALL, "trellis", 32)
    with pytest.raises(ValueError, match=r"model of trellis has \d+ parameters, "):
        small_models.equal_parameters(wide, mqar.SMALL.scale)
