"""The check of the GPU kernels, where there is no GPU to check them on."""

import jax
import pytest

from experiments.ops import check_gpu
from experiments.ops.cases import Shape


def test_nothing_is_checked_without_a_gpu(capsys, tmp_path):
    output = tmp_path / "result"
    code = check_gpu.main(check_gpu.Config(output=output))
    error = capsys.readouterr().err
    assert code == 2 and not (tmp_path / "result.json").exists()
    assert error == "nothing was checked: it needs a gpu, jax runs on cpu\n"


@pytest.mark.slow
def test_a_case_compares_everything_with_the_token_loop(monkeypatch):
    real = check_gpu.pull

    def pull(case, implementation, tokens):
        """Another form in the kernel's place, whose gradients are a tenth off."""
        if implementation != "pallas_gpu":
            return real(case, implementation, tokens)
        after, y, gradients = real(case, "xla", tokens)
        return after, y, jax.tree.map(lambda x: 1.1 * x, gradients)

    monkeypatch.setattr(check_gpu, "pull", pull)
    case = check_gpu.lattice_case(Shape(1, 20, 1, 16), 8, "sim")
    row = check_gpu.measure(case, 2e-2)
    assert 0 < row["reads"] < 1e-2 and 0 < row["memory"] < 1e-2
    assert 0.05 < row["gradient"] < 0.2 and not row["agrees"]


@pytest.mark.slow
def test_a_kernel_that_does_not_run_is_named():
    case = check_gpu.lattice_case(Shape(1, 20, 1, 16), 8, "sim")
    row = check_gpu.measure(case, 2e-2)
    assert not row["agrees"] and "needs a gpu" in row["error"]


def test_a_tolerance_must_say_something():
    with pytest.raises(ValueError, match="tolerance must be in"):
        check_gpu.Config(tolerance=2.0)
