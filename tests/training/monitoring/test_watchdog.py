"""A step that does not end is named."""

import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from memjax.training.monitoring import watchdog
from tests.training import toy_run


def test_watchdog_warns_once_of_a_missing_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    following = toy_run.Data.__next__

    def slow_once(data: Any) -> Any:
        time.sleep(1.6 if data.position == 6 else 0)
        return following(data)

    monkeypatch.setattr(toy_run.Data, "__next__", slow_once)
    options = {"steps": 9, "save_every": 100, "watchdog_minutes": 0.5 / 60}
    with caplog.at_level(logging.WARNING, watchdog.__name__):
        assert toy_run.main(tmp_path, options) == 0
    said = [r.getMessage() for r in caplog.records if r.name == watchdog.__name__]
    assert said == [
        f"process 0 of 1 on {socket.gethostname()}: step 7 has waited for its batch "
        "for 0.0 minutes"
    ]


@pytest.mark.parametrize("long", ["compile_sleep", "evaluate_sleep"])
def test_watchdog_ignores_compilation_and_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, long: str
) -> None:
    options = {"steps": 2, "evaluate_every": 2, "watchdog_minutes": 0.4 / 60, long: 0.9}
    with caplog.at_level(logging.WARNING, watchdog.__name__):
        assert toy_run.main(tmp_path, options) == 0
    assert not [r for r in caplog.records if r.name == watchdog.__name__]
