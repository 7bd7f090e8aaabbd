"""Steps that are skipped in a row cost no checkpoint from before, and can be left."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memjax.training.config import LoopConfig
from memjax.training.loop import train
from memjax.training.resume import NonFiniteError
from tests.training import toy_run

LOOP: dict[str, Any] = {
    "steps": 40,
    "save_every": 2,
    "keep": 3,
    "max_nan_steps": 6,
    "log_every": 1,
}


@functools.partial(jax.jit, static_argnums=1)
def step(state: Any, rate: float) -> Any:
    """Parameters double as the rate is high; from 1e6 on nothing is finite."""
    finite = state["w"] < 1e6
    w = jnp.where(finite, state["w"] * (1 + rate), state["w"])
    loss = jnp.where(finite, w, jnp.nan)
    new = {"w": w, "step": state["step"] + 1}
    return new, {"loss": loss, "finite": finite}


def run(folder: Path, rate: float, **loop: Any) -> Any:
    state = {"w": jnp.ones(()), "step": jnp.zeros((), jnp.int32)}
    return train(
        lambda state, _: step(state, rate),
        state,
        toy_run.Data({}),
        LoopConfig(**LOOP | loop),
        folder,
        config_record={"optimizer": {"learning_rate": rate}},
        tokens_per_step=1,
        step_of=lambda state: state["step"],
    )


def steps(folder: Path) -> list[int]:
    names = (path.name for path in (folder / "checkpoints").iterdir())
    return sorted(int(name) for name in names if name.isdecimal())


def test_skipped_steps_delete_no_checkpoint_and_a_lower_rate_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 2**20 > 1e6: step 21 is the first that is skipped.
    with pytest.raises(NonFiniteError, match=r"steps 21 to 26\).*lower learning rate"):
        run(tmp_path, 1.0)
    assert steps(tmp_path) == [16, 18, 20]
    # A run that stops meanwhile saves beside them, and counts on.
    assert run(tmp_path, 1.0, steps=24)[1].step == 24
    assert steps(tmp_path) == [16, 18, 20, 24]
    with pytest.raises(NonFiniteError, match=r"steps 21 to 26"):
        run(tmp_path, 1.0)
    assert steps(tmp_path) == [16, 18, 20, 24]
    # Steps 20 and 24 have the parameters that are no good.
    for number in ("20", "24"):
        (tmp_path / "checkpoints" / number).rename(tmp_path / number)
    capsys.readouterr()
    state, outcome = run(tmp_path, 1e-3, steps=24)
    assert (outcome.reason, outcome.skipped_steps) == ("finished", 0)
    assert abs(float(state["w"]) - 2**18 * 1.001**6) < 20
    said = "resumed at step 18; optimizer.learning_rate was 1.0 and is now 0.001"
    assert said in capsys.readouterr().err
    assert steps(tmp_path) == [20, 22, 24]


def test_delayed_save_is_made_after_a_repeated_step(
    tmp_path: Path,
) -> None:
    options = {"steps": 9, "save_every": 3, "keep": 9, "nan_steps": [3, 4, 8]}
    assert toy_run.main(tmp_path, options) == 0
    assert steps(tmp_path) == [5, 6, 9]
