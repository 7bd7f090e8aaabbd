"""Signals end a program at once, wherever it is."""

import signal
import subprocess
import sys
import time

import pytest

#: A program that says that it is ready, and its part that follows.
BEGIN = """
import gc, hashlib, os, signal, sys, time
from memjax.leaving import Interruption, at_once
def native():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
def compiling():
    signal.signal(signal.SIGINT, Interruption())
    native()
def drawing():
    handler = Interruption()
    signal.signal(signal.SIGINT, handler)
    assert not handler.is_set()
    os.kill(os.getpid(), signal.SIGINT)
    assert handler.is_set()
    native()
def swallowing():
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("went on")
        time.sleep(1.5)
def in_a_callback():
    gc.callbacks.append(lambda *_: time.sleep(0.2))
    while True:
        gc.collect()
        time.sleep(0.1)
try:
    with at_once(resumable={}):
        print("ready", flush=True)
        {}()
except KeyboardInterrupt:
    sys.exit(130)
"""


def run(
    part: str, number: signal.Signals, resumable: bool = True
) -> tuple[int, str, str, float]:
    """Exit code, both outputs, and seconds from the signal to the end."""
    program = BEGIN.format(resumable, part)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(number)
    start = time.monotonic()
    output, errors = process.communicate(timeout=20)
    return process.returncode, output, errors, time.monotonic() - start


@pytest.mark.parametrize(
    "number,resumable,code,line",
    [
        (signal.SIGTERM, True, 75, "memjax: SIGTERM; run the same command again\n"),
        (signal.SIGTERM, False, 143, "memjax: stopped by SIGTERM\n"),
        (signal.SIGINT, True, 130, "memjax: interrupted\n"),
    ],
)
def test_native_code_does_not_hold_a_signal_up(
    number: signal.Signals, resumable: bool, code: int, line: str
) -> None:
    found, _, errors, seconds = run("native", number, resumable)
    assert (found, errors) == (code, line)
    assert seconds < 5


@pytest.mark.slow  # Two interpreters, and a second of waiting each.
@pytest.mark.parametrize("part", ["compiling", "drawing"])
def test_chat_ends_in_native_code(part: str) -> None:
    """Also before the first word, and at a second Ctrl-C, after the first was seen."""
    code, _, errors, seconds = run(part, signal.SIGINT)
    assert (code, errors) == (130, "memjax: interrupted\n")
    assert seconds < 5


@pytest.mark.slow
def test_experiments_end_in_one_line() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "experiments.facts.study"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # In the middle of its imports.
        while not process.stderr.readline().rstrip().endswith("experiments"):
            pass
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
    assert process.returncode == 130
    assert [x for x in lines if not x.startswith("import")] == ["memjax: interrupted"]


def test_a_program_may_go_on_after_ctrl_c() -> None:
    code, output, errors, _ = run("swallowing", signal.SIGINT)
    assert (code, output, errors) == (0, "went on\n", "")


@pytest.mark.parametrize(
    "number,resumable,code",
    [
        (signal.SIGTERM, True, 75),
        (signal.SIGHUP, False, 129),
        (signal.SIGINT, True, 130),
    ],
)
def test_a_callback_swallows_no_signal(
    number: signal.Signals, resumable: bool, code: int
) -> None:
    found, _, errors, _ = run("in_a_callback", number, resumable)
    assert found == code
    assert "Traceback" not in errors


#: The object is deleted in Python's own end, after `atexit`.
LATE = """
import os
class Late:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, {})
late = Late()
from memjax.cli import entry
entry.main(["--version"])
"""


@pytest.mark.slow
def test_a_command_that_has_ended_keeps_its_exit_code() -> None:
    program = LATE.format(int(signal.SIGTERM))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
