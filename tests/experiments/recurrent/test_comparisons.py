"""The comparisons run whole at a tiny size, go on where they stand, and are fair."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.recurrent import (
    comparison,
    context_length,
    lattice_ablation,
    recall,
    seed_report,
    trellis_ablation,
)

TINY = comparison.Scale(1, 16, 2, 4, 32, 64, 2, 1e-3)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(comparison.SCALES, "cpu", TINY)


def options(folder, *only, **more):
    shared = dict(seeds=(0, 1), only=only, test_tokens=64, run_dir=folder / "runs")
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
        # Two updates teach next to nothing of 256 bytes.
        assert 100 < row["perplexity"] < 400
    assert report["config"]["steps"] == 0 and report["scale"]["steps"] == 2
    assert is_png(tmp_path / "result.png")
    assert "SIM, seed 1" in capsys.readouterr().out

    score = tmp_path / "runs" / "DeltaNet" / "seed1" / "score.json"
    score.unlink()
    lattice_ablation.main(config)
    again = load(tmp_path)
    assert "SIM, seed 1" not in capsys.readouterr().out
    assert [r["perplexity"] for r in again["rows"]] == [
        r["perplexity"] for r in report["rows"]
    ]

    other = dataclasses.replace(config, test_tokens=32)
    with pytest.raises(ValueError, match="holds the score of another run"):
        lattice_ablation.main(other)


@pytest.mark.slow
def test_trellis_ablation_runs(tmp_path):
    # The model that the test above trained: its programs are there.
    trellis_ablation.main(trellis_ablation.Config(**options(tmp_path, "DeltaNet")))
    (row,) = load(tmp_path)["perplexity"]
    assert row["name"] == "DeltaNet" and row["seeds"] == 2
    assert row["difference"] is None


@pytest.mark.slow
def test_context_length_runs(tmp_path):
    more = options(tmp_path, "Linear Attention", contexts=(16,))
    context_length.main(context_length.Config(**more))
    report = load(tmp_path)
    assert [row["context_length"] for row in report["rows"]] == [16, 16]
    assert len({row["parameters"] for row in report["rows"]}) == 1
    assert is_png(tmp_path / "result.png")
    with pytest.raises(ValueError, match="context_length=48 must divide the 64"):
        context_length.main(context_length.Config(**more | {"contexts": (48,)}))


@pytest.mark.slow
def test_recall_runs_both_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "TIMES", (2,))
    small = TINY._replace(context_length=48, tokens_per_update=48 * 4)
    monkeypatch.setattr(recall.Config, "mqar", (small, 48, (4, 12)))
    config = recall.Config(
        **options(tmp_path, "Transformer++", tasks=("mqar", "niah"), test_rows=2)
    )
    recall.main(config)
    report = load(tmp_path)
    assert set(report["accuracy"]) == {"MQAR"} | {
        f"{task}{kind}"
        for task in ("S-NIAH-PK", "S-NIAH-N", "S-NIAH-W")
        for kind in ("", ", tokens")
    }
    assert [row["pairs"] for row in report["accuracy"]["MQAR"]] == [4, 12]
    assert [row["length"] for row in report["accuracy"]["S-NIAH-W"]] == [512]
    assert all(0 <= row["mean"] < 0.5 for row in report["accuracy"]["MQAR"])
    assert is_png(tmp_path / "result_pairs.png")
    assert is_png(tmp_path / "result_length.png")


@pytest.mark.slow
def test_examples_depend_on_seed_and_step_alone(monkeypatch):
    small = TINY._replace(context_length=48, tokens_per_update=48 * 4)
    monkeypatch.setattr(recall.Config, "mqar", (small, 48, (4, 12)))
    config = recall.Config()
    first, again = (
        recall.Generated(lambda step: recall._mqar_batch(config, 3, step)),
        [],
    )
    batches = [next(first) for _ in range(3)]
    first.set_state({"step": 1})
    again = next(first)
    np.testing.assert_array_equal(again.tokens, batches[1].tokens)
    assert not np.array_equal(again.tokens, batches[2].tokens)
    assert first.get_state() == {"step": 2}
    # Rows of 4 and 12 pairs in equal numbers.
    counts, rows = np.unique(np.asarray(again.mask).sum(axis=1), return_counts=True)
    assert counts.tolist() == [4, 12] and set(rows) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [trellis_ablation, lattice_ablation, context_length]
)
def test_models_have_equal_parameters(program, monkeypatch):
    monkeypatch.setitem(comparison.SCALES, "cpu", TINY._replace(model_dim=32, slots=8))
    cases = program.cases(program.Config())
    assert len({case.name for case in cases}) > 10
    counts = [comparison.parameters(case.model) for case in cases[:14]]
    # One hidden unit of the feed-forward layer more or less.
    assert max(counts) - min(counts) <= 3 * 32
    assert min(case.model.hidden_dim for case in cases) > 16


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
        ({"test_tokens": 0}, "test_tokens"),
        ({"test_rows": 0}, "test_rows"),
    ],
)
def test_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        recall.Config(**fields)


def test_unknown_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"only=\['Mamba'\] must be among"):
        context_length.main(context_length.Config(**options(tmp_path, "Mamba")))
