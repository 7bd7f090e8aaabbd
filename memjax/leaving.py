"""Leaving a program at once on a signal, in one line, also while it compiles.

Python handles a signal between two of its instructions, and native code, such as XLA's
compiler, may take minutes to the next. A thread hears of every signal, and ends the
program where Python has not handled it within a second.
"""

import atexit
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

#: Exit codes: stopped by a signal, with nothing lost, and to be run again (the
#: `EX_TEMPFAIL` of sysexits.h); by Ctrl-C.
EXIT_PREEMPTED, EXIT_INTERRUPTED = os.EX_TEMPFAIL, 130
#: Signals to stop, besides Ctrl-C: of the system, of a closed terminal, and of Slurm's
#: `--signal=USR1`.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: Seconds in which Python handles a signal; in which a program then ends by itself.
HANDLED, ENDED = 1.0, 15.0


def catchable() -> tuple[signal.Signals, ...]:
    """The signals to stop, without those that are ignored."""
    # `nohup` starts a program with SIGHUP ignored.
    given = (*STOPPING, signal.SIGINT)
    return tuple(n for n in given if signal.getsignal(n) != signal.SIG_IGN)


class Exit:
    """Handler that ends the program: KeyboardInterrupt for Ctrl-C, or SystemExit.

    Args:
        number: of the signal.
        closed: set where the program needs no handler any more.
        resumable: whether the same command goes on where this one ends.
        direct: end it here, without exceptions, which imports of native modules and
            callbacks turn into others.
    """

    def __init__(
        self,
        number: signal.Signals,
        closed: threading.Event,
        resumable: bool = False,
        direct: bool = False,
    ):
        self._direct = direct
        self._is_interrupt = number == signal.SIGINT
        # As a shell reports a program that a signal has ended; of Ctrl-C it is 130.
        self._code, self._line = 128 + number, f"stopped by {number.name}"
        if self._is_interrupt:
            self._line = "interrupted"
        elif resumable:
            self._code = EXIT_PREEMPTED
            self._line = f"{number.name}; run the same command again"
        self._handled, self._closed = threading.Event(), closed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python; further signals to a program that ends are ignored."""
        again = self._handled.is_set()
        self._handled.set()
        if self._direct:
            with suppress(Exception):
                sys.stdout.flush()
            self._end()
        if self._is_interrupt:
            raise KeyboardInterrupt
        if not again:
            _say(self._line)
            raise SystemExit(self._code)

    def watch(self) -> None:
        """Ends the program unless Python does."""
        if not self._handled.wait(HANDLED):
            self._end()
        if self._is_interrupt:
            # A program that asks for lines, as a chat, may go on.
            self._handled.clear()
        elif not self._closed.wait(ENDED):
            os._exit(self._code)

    def _end(self) -> NoReturn:
        _say(self._line)
        os._exit(self._code)


class Interruption(Exit):
    """Handler of Ctrl-C while an answer is drawn: a flag, and at the second the end.

    The end at once, too, before the flag has been looked at: a model is compiled.
    """

    def __init__(self) -> None:
        super().__init__(signal.SIGINT, threading.Event())
        self._pressed = self._asked = False
        self._heard = 0

    def is_set(self) -> bool:
        """True once Ctrl-C was pressed."""
        self._asked = True
        return self._pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python."""
        self._handled.set()
        if self._pressed or not self._asked:
            raise KeyboardInterrupt
        self._pressed = True

    def watch(self) -> None:
        """Ends the program unless Python does, or an answer is to end first."""
        self._heard += 1
        if self._heard > 1 or not self._asked:
            super().watch()
        else:
            self._handled.wait()
            self._handled.clear()


def ignore_at_end() -> None:
    """Once a command has ended, signals no longer change its exit code.

    Python takes a second or two to end after JAX, without handlers of its own.
    """
    # It runs after what is registered later: the end of a run on several hosts, which
    # waits for the others, can still be stopped.
    atexit.register(_ignore)


def _ignore() -> None:
    for number in catchable():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def flushed() -> Iterator[None]:
    """Writes out at the end what was printed, and ends silently without a reader."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # As `head` does after its lines. Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def end_with_parent() -> None:
    """On Linux, a parent that is killed takes this process with it."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def at_once(resumable: bool, direct: bool = False) -> Iterator[None]:
    """Until the block ends, Ctrl-C and `STOPPING` end the program at once.

    The exit code is 128 and the signal's number, 130 of Ctrl-C. Other handlers that are
    set meanwhile are left to themselves.

    Args:
        resumable: the exit code of `STOPPING` is 75, to be run again.
        direct: see `Exit`.
    """
    closed = threading.Event()
    handlers = {n: Exit(n, closed, resumable, direct) for n in catchable()}
    before = {n: signal.signal(n, handler) for n, handler in handlers.items()}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_unraisable, hook)
    try:
        yield
    finally:
        closed.set()
        sys.unraisablehook = hook
        signal.set_wakeup_fd(woken)
        os.close(writer)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _watch(reader: int) -> None:
    """In a thread: hears of signals, until the pipe is closed."""
    while heard := os.read(reader, 1):
        handler = signal.getsignal(heard[0])
        if isinstance(handler, Exit):
            threading.Thread(target=handler.watch, daemon=True).start()
    os.close(reader)


def _say(line: str) -> None:
    # A status line is removed, and the cursor shown that it has hidden.
    clean = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
    # Not by a stream, which a signal may have stopped in the middle of a line.
    os.write(2, f"{clean}memjax: {line}\n".encode())


def _unraisable(otherwise: Callable[[Any], None], found: Any) -> None:
    """Python drops exceptions of callbacks, as of JAX's garbage collection."""
    if isinstance(found.exc_value, SystemExit):
        code = found.exc_value.code
        os._exit(code if isinstance(code, int) else EXIT_PREEMPTED)
    elif isinstance(found.exc_value, KeyboardInterrupt):
        # Again, when the callback has returned.
        threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,)).start()
    else:
        otherwise(found)
