"""What asks a run to stop, and what a second signal may not do."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from memjax import leaving
from memjax.cli import entry
from memjax.cli import main as cli
from memjax.training import pretrain
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.distributed import multihost
from tests.training import toy_run

LOOP = {"steps": 40, "save_every": 5, "log_every": 1}


def send(*numbers: int) -> None:
    """Sends signals to this process; Python handles them before the next line."""
    for number in numbers:
        os.kill(os.getpid(), number)


def send_at(step: int, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    following = toy_run.Data.__next__

    def disturbed(data: Any) -> Any:
        if data.position == step:
            send(*numbers)
        return following(data)

    monkeypatch.setattr(toy_run.Data, "__next__", disturbed)


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGHUP], [signal.SIGUSR1], [signal.SIGTERM, signal.SIGINT]],
)
def test_a_signal_saves_and_exits_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int]
) -> None:
    before = [signal.getsignal(number) for number in leaving.STOPPING]
    send_at(7, monkeypatch, *numbers)
    assert toy_run.main(tmp_path, LOOP) == 75
    assert (tmp_path / "checkpoints" / "8" / "digests.json").exists()
    assert [signal.getsignal(number) for number in leaving.STOPPING] == before


def test_interrupts_during_a_save_do_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, wait = Checkpoints.save, Checkpoints.wait

    def interrupted_save(*args: Any, **options: Any) -> None:
        send(signal.SIGINT, signal.SIGINT)
        save(*args, **options)

    def interrupted_wait(checkpoints: Checkpoints) -> None:
        if checkpoints.steps():
            send(signal.SIGINT)
        wait(checkpoints)

    monkeypatch.setattr(Checkpoints, "save", interrupted_save)
    monkeypatch.setattr(Checkpoints, "wait", interrupted_wait)
    assert toy_run.main(tmp_path, LOOP) == 75
    assert (tmp_path / "checkpoints" / "5" / "digests.json").exists()


def test_second_interrupt_ends_a_hanging_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_at(3, monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        toy_run.main(tmp_path, LOOP)


def test_hangup_stays_ignored_under_nohup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        send_at(3, monkeypatch, signal.SIGHUP)
        assert toy_run.main(tmp_path, LOOP) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_go_to_the_preemption_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_on: list[int] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with multihost.StopSignals():
        monkeypatch.setattr(os, "kill", lambda _, number: passed_on.append(number))
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
    assert passed_on == [signal.SIGTERM] * 4


@pytest.mark.parametrize(
    "number,code", [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_before_the_first_step_ends_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    code: int,
) -> None:
    before = [signal.getsignal(n) for n in leaving.catchable()]
    monkeypatch.setattr(pretrain, "load_tokenizer", lambda _: send(number))
    monkeypatch.setattr(cli, "enable_compilation_cache", lambda _: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as stopped:
        entry.main(["train", "elastic-tiny", "--run-dir", str(tmp_path)])
    assert stopped.value.code == code
    said = "interrupted" if code == 130 else "run the same command again"
    assert said in capfd.readouterr().err
    assert [signal.getsignal(n) for n in leaving.catchable()] == before


def test_signals_save_once_a_step_is_made(tmp_path: Path) -> None:
    with leaving.at_once(resumable=True):
        with multihost.StopSignals() as signals:
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGTERM)
            signals.keep()
            signal.raise_signal(signal.SIGUSR1)
            assert signals.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
