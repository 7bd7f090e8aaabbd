"""The check of the GPU kernels, where there is no GPU to check them on."""

import json
import subprocess
import sys

import jax
import pytest

from experiments.gpu import check
from experiments.lab.ops import Shape


def test_nothing_is_checked_without_a_gpu(capsys, tmp_path):
    code = check.main(output=tmp_path / "result")
    error = capsys.readouterr().err
    assert code == 2 and not (tmp_path / "result.json").exists()
    assert error == "nothing was checked: it needs a gpu, jax runs on cpu\n"


def small():
    shape = Shape(1, 20, 1, 16)
    return check.make_case("lattice", "lattice", shape, 8, variant="sim")


@pytest.mark.slow
def test_a_case_compares_everything_with_the_token_loop(monkeypatch):
    real, case, found = check.pull, small(), {}

    def with_gradients(**off):
        """XLA in the place of forms whose gradients are off by a factor, by name."""

        def pull(case, implementation, tokens):
            form = "xla" if implementation in off else implementation
            if form not in found:
                found[form] = real(case, form, tokens)
            after, y, gradients = found[form]
            scale = off.get(implementation, 1.0)
            return after, y, jax.tree.map(lambda x: scale * x, gradients)

        monkeypatch.setattr(check, "pull", pull)
        return check.measure(case)

    row = with_gradients(pallas_gpu=1.1)
    assert 0 < row["reads"] < 1e-2 and 0 < row["memory"] < 1e-2
    assert 0.05 < row["gradient"] < 0.2 and not row["agrees"]
    assert 0 < row["xla_gradient"] < 1e-2

    # A kernel may be as far from the loop as XLA.
    row = with_gradients(pallas_gpu=1.1, xla=1.1)
    assert 0.05 < row["gradient"] < 0.2 and row["agrees"]
    row = with_gradients()
    assert not row["agrees"] and "needs a gpu" in row["error"]


def run_with(monkeypatch, code):
    """Another program in the place of a case's process."""
    real = subprocess.run

    def run(command, **options):
        assert command[:3] == [sys.executable, "-m", "experiments.gpu.check"]
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", run)
    return check.in_process("a case")


def test_a_case_hands_over_its_row_or_the_error_of_its_process(monkeypatch):
    printed = {"reads": 1e-3, "error": "", "agrees": True}
    code = f"print('a warning'); print({json.dumps(json.dumps(printed))})"
    assert run_with(monkeypatch, code).items() >= printed.items()
    monkeypatch.undo()
    row = run_with(monkeypatch, "import os; os.abort()")
    assert row["error"] == "ended with code -6: no message" and not row["agrees"]


def test_every_case_is_written(monkeypatch, tmp_path):
    def in_process(name):
        numbers = dict.fromkeys(check.MEASURED, 1e-3)
        row = {"case": name, "error": "", "agrees": "softmax" not in name}
        return row | numbers | {"seconds": 1.0}

    monkeypatch.setattr(check, "in_process", in_process)
    check.check_all(2, tmp_path / "result")
    cases = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert [row["case"] for row in cases] == list(check.all_cases())
