"""The reconstruction experiment runs, and its bounds hold."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BOUNDS = {(1, 32): 1.2e-5, (0, 32): 0.97, (0, 128): 0.90, (0, 512): 0.72}


@pytest.fixture(scope="module")
def experiment():
    path = ROOT / "experiments" / "hippo_reconstruction.py"
    spec = importlib.util.spec_from_file_location("hippo_reconstruction", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is being executed.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_small_run_writes_table_and_plot(experiment, tmp_path, capsys):
    config = experiment.Config(length=64, seeds=2, output=tmp_path / "deep" / "small")
    experiment.main(config)
    report = json.loads((tmp_path / "deep" / "small.json").read_text())
    assert [row["paper"] for row in report["rows"]] == [
        case.paper for case in experiment.TABLE_12
    ]
    assert all(len(row["mse"]) == 2 for row in report["rows"])
    assert report["bank_minus_recurrence"] <= 1e-10
    assert (tmp_path / "deep" / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "5 sine, N=32, bilinear" in capsys.readouterr().out


def test_bounds_of_the_paper_hold(experiment):
    config = experiment.Config(seeds=10)
    checked = 0
    for case in experiment.TABLE_12:
        bound = BOUNDS.get((case.waves, case.order))
        if bound is not None:
            assert experiment.measure(config, case)["mse_median"] <= bound, case
            checked += 1
    assert checked == len(BOUNDS)


def test_committed_result_keeps_the_bounds():
    path = ROOT / "experiments" / "results" / "hippo_reconstruction.json"
    report = json.loads(path.read_text())
    assert report["config"]["seeds"] >= 10
    for row in report["rows"]:
        bound = BOUNDS.get((row["waves"], row["order"]), 1)
        assert row["mse_median"] <= bound


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 0}, "seeds must"),
        ({"length": 0}, "length"),
        ({"min_cycles": 6.0}, "min_cycles must"),
    ],
)
def test_bad_config_is_refused(experiment, fields, message):
    with pytest.raises(ValueError, match=message):
        experiment.Config(**fields)
