"""The HiPPO experiments run, and their bounds hold."""

import json

import pytest

from experiments.elastic import hippo_bank, hippo_reconstruction
from experiments.lab.results import RESULTS

BOUNDS = {(1, 32): 1.2e-5, (0, 32): 0.97, (0, 128): 0.90, (0, 512): 0.72}


@pytest.mark.slow
def test_small_run_writes_table_and_plot(tmp_path, capsys):
    config = hippo_reconstruction.Config(
        length=64, seeds=2, output=tmp_path / "deep" / "small"
    )
    hippo_reconstruction.main(config)
    report = json.loads((tmp_path / "deep" / "small.json").read_text())
    assert [row["paper"] for row in report["rows"]] == [
        case.paper for case in hippo_reconstruction.TABLE_12
    ]
    assert all(len(row["mse"]) == 2 for row in report["rows"])
    assert report["bank_minus_recurrence"] <= 1e-10
    assert (tmp_path / "deep" / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "5 sine, N=32, bilinear" in capsys.readouterr().out


def test_bounds_of_the_paper_hold():
    config = hippo_reconstruction.Config(seeds=10)
    checked = 0
    for case in hippo_reconstruction.TABLE_12:
        bound = BOUNDS.get((case.waves, case.order))
        if bound is not None:
            assert hippo_reconstruction.measure(config, case)["mse_median"] <= bound, (
                case
            )
            checked += 1
    assert checked == len(BOUNDS)


def test_committed_result_keeps_the_bounds():
    path = RESULTS / "elastic" / "hippo_reconstruction.json"
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
def test_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hippo_reconstruction.Config(**fields)


def test_benchmark_times_equal_matrices(tmp_path):
    config = hippo_bank.Config(
        order=8,
        block_length=16,
        whole_order=8,
        whole_block_length=16,
        whole_blocks=2,
        growth=(4, 8),
        repeats=1,
        output=tmp_path / "bank",
    )
    hippo_bank.main(config)
    report = json.loads((tmp_path / "bank.json").read_text())
    assert report["compared"]["largest_difference"] <= 1e-10
    assert [row["order"] for row in report["growth"]] == [4, 8]
    assert report["whole_bank"]["bytes"] == 4 * 2 * 8 * (8 + 16)
    with pytest.raises(ValueError, match="repeats must"):
        hippo_bank.Config(repeats=0)


def test_committed_benchmark_is_a_hundred_times_faster():
    path = RESULTS / "elastic" / "hippo_bank.json"
    report = json.loads(path.read_text())
    assert report["compared"]["least_speedup"] >= 100
    assert report["whole_bank"]["max_s"] < 10
