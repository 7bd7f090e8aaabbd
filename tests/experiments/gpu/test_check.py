"""The check of the GPU kernels, where there is no GPU to check them on."""

import json
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from experiments.gpu import check
from experiments.lab.ops import Shape


def test_nothing_is_checked_without_a_gpu(capsys, tmp_path):
    output = tmp_path / "result"
    code = check.main(check.Config(output=output))
    error = capsys.readouterr().err
    assert code == 2 and not (tmp_path / "result.json").exists()
    assert error == "nothing was checked: it needs a gpu, jax runs on cpu\n"


def with_gradients(monkeypatch, off):
    """XLA in the place of forms whose gradients are off by a factor, by name."""
    real = check.pull

    def pull(case, implementation, tokens):
        if implementation not in off:
            return real(case, implementation, tokens)
        after, y, gradients = real(case, "xla", tokens)
        scale = off[implementation]
        return after, y, jax.tree.map(lambda x: scale * x, gradients)

    monkeypatch.setattr(check, "pull", pull)
    case = check.lattice_case("lattice", Shape(1, 20, 1, 16), 8, "sim")
    return check.measure(case, 2e-2)


@pytest.mark.slow
def test_a_case_compares_everything_with_the_token_loop(monkeypatch):
    row = with_gradients(monkeypatch, {"pallas_gpu": 1.1})
    assert 0 < row["reads"] < 1e-2 and 0 < row["memory"] < 1e-2
    assert 0.05 < row["gradient"] < 0.2 and not row["agrees"]
    assert 0 < row["xla_gradient"] < 1e-2


@pytest.mark.slow
def test_a_kernel_may_be_as_far_from_the_loop_as_xla(monkeypatch):
    row = with_gradients(monkeypatch, {"pallas_gpu": 1.1, "xla": 1.1})
    assert 0.05 < row["gradient"] < 0.2 and row["agrees"]


@pytest.mark.slow
def test_a_kernel_that_does_not_run_is_named():
    case = check.lattice_case("lattice", Shape(1, 20, 1, 16), 8, "sim")
    row = check.measure(case, 2e-2)
    assert not row["agrees"] and "needs a gpu" in row["error"]


def run_with(monkeypatch, code):
    """Another program in the place of a case's process."""
    real = subprocess.run

    def run(command, **options):
        assert command[:3] == [sys.executable, "-m", "experiments.gpu.check"]
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", run)
    return check.in_process(check.Config(seconds=1), "a case")


@pytest.mark.parametrize(
    "code, error",
    [
        ("import os; os.abort()", "ended with code -6: no message"),
        ("raise OSError('no GPU left')", "ended with code 1: OSError: no GPU left"),
        ("import time; time.sleep(60)", "stopped after 1 seconds"),
    ],
)
def test_a_case_that_takes_its_process_along_is_named(monkeypatch, code, error):
    row = run_with(monkeypatch, code)
    assert row["case"] == "a case" and row["error"] == error and not row["agrees"]


def test_a_case_hands_its_row_over(monkeypatch):
    printed = {"reads": 1e-3, "error": "", "agrees": True}
    code = f"print('a warning'); print({json.dumps(json.dumps(printed))})"
    row = run_with(monkeypatch, code)
    assert row.items() >= printed.items() and row["seconds"] > 0


def test_every_case_is_written(monkeypatch, tmp_path):
    def in_process(config, name):
        numbers = dict.fromkeys(check.MEASURED, 1e-3)
        row = {"case": name, "error": "", "agrees": "softmax" not in name}
        return row | numbers | {"seconds": 1.0}

    monkeypatch.setattr(check, "in_process", in_process)
    config = check.Config(output=tmp_path / "result")
    check.check_all(config, Console())
    cases = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert [row["case"] for row in cases] == list(check.all_cases())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tolerance": 2.0}, "tolerance must be in"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"case": "mamba"}, "case must be of .*trellis.*, got 'mamba'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check.Config(**options)
