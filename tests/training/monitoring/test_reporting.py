"""The run log: valid JSON, each step once, plain lines or a bar."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import pytest

from memjax import status
from memjax.training.monitoring.reporting import Reporter


def reporter(run_dir: Path, step: int = 0, steps: int = 100) -> Reporter:
    return Reporter(run_dir, step=step, steps=steps, tokens_per_step=50)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_lines_have_step_time_values_and_only_json(tmp_path: Path) -> None:
    with reporter(tmp_path) as log:
        log.log(1, {"loss": 2.5})
        log.log(2, {"loss": float("nan"), "norm": float("-inf")})
        log.log_evaluation(2, {"loss": 3.0})
    first, second, third = lines(tmp_path)
    assert first["step"] == 1 and first["kind"] == "train" and first["time"] > 1.7e9
    assert first["values"]["loss"] == 2.5
    assert second["values"]["loss"] is None and second["values"]["norm"] is None
    assert third["kind"] == "evaluation" and third["values"] == {"loss": 3.0}


def test_resuming_drops_later_steps_and_a_line_cut_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reporter(tmp_path) as log:
        for step in range(1, 6):
            log.log(step, {"loss": float(step)})
        log.log_evaluation(3, {"loss": 0.0})
        log.log_evaluation(5, {"loss": 0.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kin')
    with caplog.at_level(logging.WARNING):
        log = reporter(tmp_path, step=3)
    assert "line 8 dropped" in caplog.text
    with log:
        assert log.evaluated(3) and not log.evaluated(5)
        log.log(4, {"loss": 40.0})
    found = [(e["step"], e["kind"]) for e in lines(tmp_path)]
    assert found == [(n, "train") for n in (1, 2, 3)] + [
        (3, "evaluation"),
        (4, "train"),
    ]
    assert lines(tmp_path)[-1]["values"]["loss"] == 40.0


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PAUSE", 0.0)
    with reporter(tmp_path, step=10) as log:
        log.log(11, {"loss": 1.25, "skipped_steps": 2.0})
        log.message("[bold]kept as it is[/bold]")
    out, err = capsys.readouterr()
    first, second = err.splitlines()[-2:]
    assert first.startswith("step 11/100  loss 1.2500  ETA 0:")
    assert "  2 skipped  " in first and first.endswith("tokens/s")
    assert second == "[bold]kept as it is[/bold]"
    assert out == "" and "\x1b" not in err


def test_narrow_terminal_shows_all_of_the_step_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    with reporter(tmp_path, steps=1_000_000) as log:
        log.log(123_456, {"loss": 1.25})
    err = capsys.readouterr().err
    assert "123,456/1,000,000" in err and "loss" not in err


def test_speed_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        "memjax.training.monitoring.reporting.time.perf_counter", lambda: now[0]
    )
    monkeypatch.setattr(status, "PAUSE", 0.0)
    with reporter(tmp_path) as log:
        now[0] += 1000.0  # the first step, with its compilation
        log.start_clock(1)
        now[0] += 9 * 2.0
        with log.paused():
            now[0] += 500.0
        log.log(10, {"loss": 1.0})
    assert lines(tmp_path)[0]["values"]["tokens_per_second"] == 25.0
    err = capsys.readouterr().err
    assert "ETA 0:03:00  2 s/step  25 tokens/s" in err
    # Once, after the first steps.
    assert "about 0:03:00 to step 100, without evaluations" in err


def test_only_process_0_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with reporter(tmp_path / "run") as log:
        log.log(1, {"loss": 1.0})
        log.log_evaluation(1, {"loss": 1.0})
        log.sync(1)
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()
