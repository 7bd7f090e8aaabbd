"""Step time, use of the devices' peak, memory in use, and time that was lost."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memjax.mechanisms import AttentionConfig, ElasticMemoryConfig, SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.training.monitoring import device_peaks, goodput, model_flops, speed
from memjax.training.monitoring.goodput import Goodput
from memjax.training.pretrain import abstract_model
from tests.training import toy_run


class Device:
    """A chip of which `used` bytes are in use."""

    device_kind = "TPU v5 lite"

    def __init__(self, used: int):
        self._used = used

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self._used, "peak_bytes_in_use": 2 * self._used}


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def test_mfu_is_of_all_devices_and_memory_of_the_fullest(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [Device(2**30), Device(3 * 2**30)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    measured = speed.Speed(0, 500, 197e12, Goodput(tmp_path, 0))
    clock[0] += 10.0
    measured.leave_out(2.0)
    assert measured.line(4) == {
        "step_seconds": 2.0,
        "tokens_per_second": 250.0,
        # Half of a device's peak second in 2 seconds of two devices.
        "mfu": 0.25,
        "goodput": 0.8,
        "hbm_gib": 3.0,
        "hbm_peak_gib": 6.0,
    }
    assert "step_seconds" not in measured.line(4)


def test_a_device_without_a_known_peak_has_no_mfu(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = speed.Speed(0, 500, 1e12, Goodput(tmp_path, 0))
    clock[0] += 1.0
    assert set(measured.line(1)) == {"step_seconds", "tokens_per_second", "goodput"}
    assert device_peaks.peak_flops() is None


def test_goodput_excludes_repeated_steps(tmp_path: Path, clock: list[float]) -> None:
    first = Goodput(tmp_path, 0)
    first.add(30.0)
    first.mark(10)
    first.add(20.0)
    clock[0] += 100.0
    assert first.share() == 0.5
    # Killed at step 15 or so, and started again at step 10, 60 seconds later.
    clock[0] += 60.0
    second = Goodput(tmp_path, 10)
    assert second.starts == 2
    second.add(40.0)
    clock[0] += 40.0
    assert second.share() == pytest.approx(70 / 200)
    # With its first checkpoint lost all is done again.
    assert Goodput(tmp_path, 0).share() == 0.0


def test_save_between_two_lines_is_not_counted_twice(
    tmp_path: Path, clock: list[float]
) -> None:
    measured = speed.Speed(0, 1, None, Goodput(tmp_path, 0))
    for at in (2, 4):
        clock[0] += 3.0
        measured.mark(at)
    clock[0] += 4.0
    assert measured.line(5)["goodput"] == 1.0
    clock[0] += 10.0
    assert measured.line(5)["goodput"] == 0.5
    record = json.loads((tmp_path / goodput.GOODPUT_FILE).read_text())
    assert record["seconds_at"] == [[2, 3.0], [4, 6.0]]


def test_damaged_goodput_record_is_restarted(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / goodput.GOODPUT_FILE).write_text('{"starts": "many"}')
    assert Goodput(tmp_path, 5).starts == 1
    assert "is restarted, as it cannot be read" in caplog.text


def test_saves_and_restarts_are_counted_by_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"save_every": 2, "log_every": 3, "sleep": 0.01}
    toy_run.main(tmp_path, options | {"steps": 5})
    toy_run.main(tmp_path, options | {"steps": 8})
    said = capsys.readouterr().err
    assert "first step done" in said
    assert "resumed at step 5; start 2, goodput " in said
    record = json.loads((tmp_path / goodput.GOODPUT_FILE).read_text())
    assert record["starts"] == 2
    steps, seconds = zip(*record["seconds_at"], strict=True)
    assert steps == (2, 4, 5, 6, 8)
    assert list(seconds) == sorted(seconds) and seconds[-1] >= 0.04


def model(mechanism: Any, **changes: Any) -> LanguageModel:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "vocab_size": 32,
        "model_dim": 16,
        "hidden_dim": 24,
    }
    return abstract_model(ModelConfig(mechanisms=(mechanism,), **(sizes | changes)))


#: Products with the weights of two layers: 4 heads of 4, two of keys and values.
LAYERS = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24)
HEADS = (16, 4, 2, 4)


@pytest.mark.parametrize(
    ("mechanism", "positions"),
    [
        (AttentionConfig(*HEADS), 4.5),
        (SlidingWindowConfig(*HEADS, window=2), (1 + 7 * 2) / 8),
        (SlidingWindowConfig(*HEADS, window=99), 4.5),
        # Half of the tokens are in the second block, and read 3 points beside it.
        (ElasticMemoryConfig(*HEADS, block=4, order=3), 2.5 + 1.5),
    ],
)
def test_operations_of_a_token(mechanism: Any, positions: float) -> None:
    head = 16 * 32
    expected = 6 * (LAYERS + head) + 12 * 2 * 16 * positions
    assert model_flops.flops_per_token(model(mechanism), 8) == expected
    # A table that is only looked up costs nothing; the head beside it does.
    untied = model(mechanism, tied_head=False)
    assert model_flops.flops_per_token(untied, 8) == expected


def test_operations_of_a_token_with_a_frozen_backbone() -> None:
    backbone, head = model(AttentionConfig(*HEADS)), 16 * 32
    adapters = {"a": jnp.zeros((16, 2)), "b": jnp.zeros((2, 16)), "bias": jnp.zeros(9)}
    of = functools.partial(model_flops.flops_per_tuned_token, backbone)
    assert of(adapters, {"w": jnp.zeros(1)}) == 4 * (LAYERS + head) + 2 * 64
    # All of it is trained.
    assert of(adapters, {}) == 6 * (LAYERS + head)
