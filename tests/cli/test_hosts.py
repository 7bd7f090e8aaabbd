"""Supervision of a command that joins other hosts."""

import signal
import subprocess
import sys
import time

import pytest

from memjax.cli.hosts import joins_hosts

pytestmark = pytest.mark.slow
SAID = "W1125 10:28:08.8 15303 preemption_sync_manager.cc:147] Failed to retrieve"
FATAL = (
    "F1125 10:28:08.9 1 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. The following tasks are unhealthy (stopped sending "
    "heartbeats):\\n3\\nThe tasks have crashed.\\n*** Check failure stack trace: ***"
)


def supervised(program: str, patience: float = 20.0) -> subprocess.Popen[str]:
    child = [sys.executable, "-uc", f"import os, signal, sys, time\n{program}"]
    parent = (
        "import sys; from memjax.cli import hosts\n"
        f"hosts.PATIENCE = {patience}\nsys.exit(hosts.supervise({child!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True
    )


def end_of(program: str, patience: float = 20.0) -> tuple[int, str]:
    process = supervised(program, patience)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_lost_process_is_one_line_and_exit_code_75() -> None:
    program = f"print('before', file=sys.stderr)\nprint({SAID!r}, file=sys.stderr)\n"
    program += f'print("{FATAL}", file=sys.stderr)\nos.abort()'
    code, errors = end_of(program)
    before, line = errors.splitlines()
    assert (code, before) == (75, "before")
    assert "process 3 has ended or is not reached any more" in line


def test_other_aborts_keep_their_output() -> None:
    code, errors = end_of(f"print({SAID!r}, file=sys.stderr)\nos.abort()")
    assert code == 128 + signal.SIGABRT and errors == f"{SAID}\n"


def test_warnings_of_a_running_command_are_passed_on_late() -> None:
    program = f"print({SAID!r}, file=sys.stderr)\ntime.sleep(1.5)\n"
    program += "print('later', file=sys.stderr)\nsys.exit(2)"
    begun = time.monotonic()
    code, errors = end_of(program, patience=0.5)
    assert (code, errors) == (2, f"{SAID}\nlater\n")
    assert time.monotonic() - begun < 30


def test_partial_line_and_exit_code_are_passed_on() -> None:
    assert end_of("sys.stderr.write('question? ')\nsys.exit(75)") == (75, "question? ")


def test_signals_are_passed_on() -> None:
    program = (
        "signal.signal(signal.SIGHUP, lambda *_: sys.exit(7))\n"
        "print('ready', file=sys.stderr)\ntime.sleep(60)"
    )
    process = supervised(program)
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_which_commands_join_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_WORKER_HOSTNAMES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not joins_hosts(["train", "elastic-tiny"])
    assert joins_hosts(["train", "elastic-tiny", "--distributed", "on"])
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert joins_hosts(["train", "elastic-tiny"])
    assert not joins_hosts(["train", "elastic-tiny", "--distributed=off"])
    assert not joins_hosts(["eval", "runs/one"])
