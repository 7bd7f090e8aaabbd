"""The comparisons run whole at a tiny size, go on where they stand, and are fair."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.memories import cases as study
from experiments.memories import (
    lattice_ablation,
    mqar,
    needles,
    on_device,
    recall,
    seed_report,
    trellis_ablation,
    trellis_steps,
)
from experiments.memories import small_models as comparison
from memjax.training import pretrain as run

TINY = comparison.Scale(1, 16, 2, 4, 32, 64, 2, 1e-3)
WIDE = TINY._replace(model_dim=32, context_length=48, tokens_per_update=48 * 4)
TASK = mqar.Task(WIDE, 48, 12, (2, 6), (2, 6, 16), (48, 64))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(comparison.SCALES, "cpu", TINY)
    monkeypatch.setattr(mqar, "SMALL", TASK)


def options(folder, *only, **more):
    shared = dict(seeds=(0, 1), only=only, test_rows=2, run_dir=folder / "runs")
    return shared | {"output": folder / "result"} | more


def load(folder):
    return json.loads((folder / "result.json").read_text())


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_ablation_trains_scores_and_goes_on(tmp_path, capsys):
    config = lattice_ablation.Config(**options(tmp_path, "DeltaNet", "SIM"))
    lattice_ablation.main(config)
    report = load(tmp_path)
    assert [(row["name"], row["seed"]) for row in report["rows"]] == [
        (name, seed) for name in ("DeltaNet", "SIM") for seed in (0, 1)
    ]
    for row in report["rows"]:
        tests = [(48, 2), (48, 6), (64, 2), (64, 6), (64, 16)]
        assert [(s["length"], s["pairs"]) for s in row["scores"]] == tests
        # Two updates teach next to nothing.
        assert all(0 <= score["tokens"] <= 0.5 for score in row["scores"])
    assert report["config"]["steps"] == 0 and report["task"]["scale"]["steps"] == 2
    assert is_png(tmp_path / "result.png")
    assert "SIM, seed 1" in capsys.readouterr().out

    score = tmp_path / "runs" / "DeltaNet" / "seed1" / "score.json"
    score.unlink()
    lattice_ablation.main(config)
    again = load(tmp_path)
    assert "SIM, seed 1" not in capsys.readouterr().out
    scores = lambda report: [row["scores"] for row in report["rows"]]
    assert scores(again) == scores(report)

    other = dataclasses.replace(config, test_rows=3)
    with pytest.raises(ValueError, match="holds the score of another run"):
        lattice_ablation.main(other)


@pytest.mark.slow
def test_recall_tests_the_learning_rate_that_validation_chose(tmp_path):
    config = recall.Config(**options(tmp_path, "Transformer++", "sliding window"))
    recall.main(config)
    report = load(tmp_path)
    assert len(report["tried"]) == 4
    for name in config.only:
        tried = [row for row in report["tried"] if row["name"] == name]
        best = max(tried, key=lambda row: row["validation"])
        (rate,) = {r["learning_rate"] for r in report["rows"] if r["name"] == name}
        assert rate == best["learning_rate"]
    assert set(report["accuracy"]) == {"48", "64"}
    assert is_png(tmp_path / "result.png")


def test_the_learning_rate_with_most_right_answers_is_chosen():
    case = study.Case("a", mqar.model(TASK, "deltanet"))
    cases = [case._replace(fields={"learning_rate": rate}) for rate in (1, 2, 3)]
    answers = zip((1, 2, 3), (0.2, 0.4, 0.3), strict=True)
    tried = [{"name": "a", "learning_rate": r, "validation": v} for r, v in answers]
    (chosen,) = recall.best(cases, tried)
    assert chosen.fields == {"learning_rate": 2}


@pytest.mark.slow
def test_needles_run(tmp_path, monkeypatch):
    monkeypatch.setattr(needles, "TIMES", (2,))
    needles.main(needles.Config(**options(tmp_path, "Transformer++")))
    report = load(tmp_path)
    assert set(report["accuracy"]) == {
        f"{task}{kind}"
        for task in ("S-NIAH-PK", "S-NIAH-N", "S-NIAH-W")
        for kind in ("", ", tokens")
    }
    assert [row["length"] for row in report["accuracy"]["S-NIAH-W"]] == [512]
    assert is_png(tmp_path / "result.png")


@pytest.mark.slow
def test_trellis_steps_score_validation_documents_beside_ngrams(tmp_path):
    given = options(tmp_path, "DeltaNet", validation_tokens=64)
    trellis_steps.main(trellis_steps.Config(**given))
    report = load(tmp_path)
    assert [row["task"] for row in report["rows"]] == ["recall"] * 2 + ["text"] * 2
    for row in report["rows"][2:]:
        # Two updates teach next to nothing of 256 bytes.
        assert 100 < row["perplexity"] < 400
    # 128 bytes are too few to count pairs of them.
    assert all(10 < report["ngrams"][f"{n}-gram"] < 400 for n in (2, 3, 4))


def test_examples_depend_on_seed_and_step_alone():
    data = needles.Generated(lambda step: mqar.batch(TASK, 3, step))
    batches = [next(data) for _ in range(3)]
    data.set_state({"step": 1})
    again = next(data)
    np.testing.assert_array_equal(again.tokens, batches[1].tokens)
    assert not np.array_equal(again.tokens, batches[2].tokens)
    assert data.get_state() == {"step": 2}
    # Rows of 2 and 6 pairs in equal numbers.
    counts, rows = np.unique(np.asarray(again.mask).sum(axis=1), return_counts=True)
    assert counts.tolist() == [2, 6] and set(rows) == {2}
    one, other = (mqar.sequences(TASK, seed, 2, 2, 48) for seed in (1, 2))
    assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.slow
def test_updates_on_the_device_are_those_of_the_training_loop(tmp_path):
    (model,) = comparison.equal_parameters(
        {"a": mqar.model(TASK, "deltanet")}, TASK.scale
    ).values()
    settings = comparison.run_config(TASK.scale, model, seed=3)
    draw = functools.partial(mqar.batch, TASK)
    data = needles.Generated(lambda step: draw(3, step))
    expected, _ = comparison.train(settings, data, tmp_path)
    found, _ = on_device.train(settings, draw)
    for a, b in zip(*map(leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("program", [trellis_ablation, lattice_ablation, recall])
def test_models_have_equal_parameters_and_states(program, monkeypatch):
    monkeypatch.undo()
    cases = program.cases(program.Config())
    counts = [comparison.parameters(case.model) for case in cases]
    # One hidden unit of the feed-forward layers more or less.
    assert max(counts) - min(counts) <= 3 * 32 * 2
    # What keeps all tokens, and what has other numbers of slots.
    apart = ("Transformer++", "m / 2", "2 m")
    sizes = [comparison.state_bytes(c.model) for c in cases if c.name not in apart]
    assert len(sizes) > 10 and max(sizes) / min(sizes) < 1.2
    model = cases[2].model
    state = jax.eval_shape(lambda: run.abstract_model(model).init_state(1))
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert comparison.state_bytes(model) == kept


def test_states_that_no_size_makes_equal_are_refused():
    make = lambda size: mqar.model(TASK, "deltanet")
    with pytest.raises(ValueError, match="no size gives a state of 10 bytes"):
        comparison.equal_state(make, 10)


def test_differences_are_paired_by_seed():
    rows = [
        {"name": name, "seed": seed, "ppl": value}
        for name, values in {"a": (1.0, 2.0, 4.0), "b": (0.5, 1.4, 3.5)}.items()
        for seed, value in enumerate(values)
    ]
    a, b = seed_report.summarise(rows, "ppl", "a")
    assert a["difference"] is None and not a["clear"]
    np.testing.assert_allclose(a["mean"], 7 / 3)
    np.testing.assert_allclose(a["error"], np.std([1, 2, 4], ddof=1) / 3**0.5)
    np.testing.assert_allclose(b["difference"], np.mean([-0.5, -0.6, -0.5]))
    assert b["clear"]
    (_, b) = seed_report.summarise(rows[:2] + rows[3:5], "ppl", "a")
    assert not b["clear"], "two seeds claim nothing"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": (1,)}, "seeds must be 2 or more"),
        ({"seeds": (1, 1)}, "seeds must be 2 or more"),
        ({"steps": -1}, "steps"),
        ({"test_rows": 0}, "test_rows"),
    ],
)
def test_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        recall.Config(**fields)


def test_what_a_comparison_cannot_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"only=\['Mamba'\] must be among"):
        recall.main(recall.Config(**options(tmp_path, "Mamba")))
    scale = TINY._replace(context_length=48)
    with pytest.raises(ValueError, match="context_length=48 must divide the 64"):
        comparison.run_config(scale, mqar.model(TASK, "deltanet"), 0)
