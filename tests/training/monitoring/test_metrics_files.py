"""Metrics on a disk that fills: training goes on, and every line comes once."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from memjax.training.monitoring.reporting import Reporter
from tests.training import processes, toy_run


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return filler


def reporter(run_dir: Path) -> Reporter:
    return Reporter(run_dir, step=0, steps=100, tokens_per_step=50)


def steps(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_tensorboard_gets_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    with reporter(tmp_path) as log:
        log.log_evaluation(7, {"loss": 0.5})
    [file] = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    expected = RecordWriter(str(tmp_path / "expected"))
    start, loss = SessionLog(status=SessionLog.START), scalar("evaluation/loss", 0.5)
    for fields in (
        {"file_version": "brain.Event:2"},
        {"step": 1, "session_log": start},
        {"step": 7, "summary": loss},
    ):
        expected.write(Event(wall_time=1.5, **fields).SerializeToString())
    expected.close()
    assert file.read_bytes() == (tmp_path / "expected").read_bytes()


def test_full_disk_is_reported_once_and_records_follow_later(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reporter(small_disk) as log:
        log.log(1, {"loss": 1.0})
        filler = fill(small_disk)
        with caplog.at_level(logging.WARNING):
            for step in range(2, 600):
                log.log(step, {"loss": 1.0, "gradient_norm": 2.0})
            log.sync(599)
            log.sync(599)
        said = [r.getMessage() for r in caplog.records]
        assert len(said) == 3 and all("training goes on" in text for text in said)
        assert b'"step": 599' not in (small_disk / "metrics.jsonl").read_bytes()
        filler.unlink()
        log.sync(599)
        assert steps(small_disk) == list(range(1, 600))
        log.log(600, {"loss": 1.0})
    assert steps(small_disk) == list(range(1, 601))


def test_a_disk_that_is_full_between_two_saves_does_not_stop_a_run(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is taken at step 3 and given back before the save at step 150."""
    filler: list[Path] = []
    following = toy_run.Data.__next__

    def disturbed(data: Any) -> Any:
        if data.position == 3:
            filler.append(fill(small_disk))
        if data.position == 148:
            filler.pop().unlink()
        return following(data)

    monkeypatch.setattr(toy_run.Data, "__next__", disturbed)
    options = {"steps": 150, "save_every": 1000, "log_every": 1}
    assert toy_run.main(small_disk / "run", options) == 0
    assert steps(small_disk / "run") == list(range(1, 151))
    assert (small_disk / "run" / "checkpoints" / "150" / "digests.json").exists()


@pytest.mark.slow
def test_closed_output_does_not_end_a_run(
    tmp_path: Path,
) -> None:
    """As `memjax train ... | head -1` does."""
    options = {"steps": 30, "save_every": 1000, "log_every": 1, "sleep": 0.02}
    process = processes.toy(tmp_path, options)
    assert next(process.lines())
    process.output.close()
    process.require_end()
    assert (tmp_path / "checkpoints" / "30" / "digests.json").exists()


def test_the_speed_is_right_around_saves(tmp_path: Path) -> None:
    """Several steps' metrics are read at once there."""
    options = {"steps": 31, "save_every": 5, "log_every": 1, "sleep": 0.02}
    assert toy_run.main(tmp_path, options) == 0
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    speeds = [line["values"].get("tokens_per_second") for line in lines]
    measured = [speed for speed in speeds if speed is not None]
    assert len(measured) > 10 and max(measured) < 1.2 * toy_run.BATCH / 0.02
