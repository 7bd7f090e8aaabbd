"""The status of a command, on stderr: stdout can be redirected.

    with Status("loading SmolLM2-135M"):
        ...
    with Status("scoring", "tokens") as status:
        status(1000, 4000)

On a terminal it is one line with a bar, which disappears; elsewhere a line as a phase
begins, and further ones at most every half minute.
"""

import logging
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from memjax.checks import printable

#: Seconds between lines without a terminal.
PAUSE = 30.0
#: Characters of the bar, and at most of the work's name.
BAR, NAME = 12, 48
_shown: list[Progress] = []


class Status:
    """A line until the block ends. Called with the amount done, it shows progress.

    Args:
        what: the work.
        unit: of the amounts.
        total: of the work, if it is known before it begins.
        done: of it, so far.
        quiet: shows nothing, in processes other than the first.
    """

    def __init__(
        self,
        what: str,
        unit: str = "",
        *,
        total: int | None = None,
        done: int = 0,
        quiet: bool = False,
    ):
        what = printable(what)
        self._what = what if len(what) <= NAME else f"...{what[3 - NAME :]}"
        self._unit, self._quiet, self._bar = unit, quiet, None
        # What knows its total says itself how it begins.
        self._announces = total is None and not quiet
        self._first, self._start = done, time.monotonic()
        self._last = self._start
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=BAR),
                _Details(console),
                console=console,
                transient=True,
                # What is printed to stdout must not go to stderr.
                redirect_stdout=False,
                refresh_per_second=5,
            )
            self._task = self._bar.add_task(
                self._what, total=total, completed=done, parts=[]
            )

    def __call__(
        self, done: int, total: int, *details: str, left: float | None = None
    ) -> None:
        """Shows progress.

        Args:
            done: amount done.
            total: of the work.
            details: what else is known, the most important first; on a narrow terminal
                the last are left out.
            left: seconds left; None assumes the speed since the start.
        """
        if self._quiet:
            return
        now = time.monotonic()
        ends, new = done >= total, done - self._first
        if left is None and new > 0:
            left = (now - self._start) / new * (total - done)
        parts = [f"{done:,}/{total:,} {self._unit}".rstrip(), *details[:1]]
        parts += [f"ETA {duration(left)}"] if left is not None and not ends else []
        parts += details[1:]
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, parts=parts)
        elif now - self._last >= PAUSE or (ends and details):
            self._last = now
            say(f"{self._what} {'  '.join(parts)}")

    def __enter__(self) -> "Status":
        if self._bar is None:
            if self._announces:
                say(f"{self._what} ...")
        else:
            # rich shows one at a time.
            if _shown:
                _shown[-1].stop()
            _shown.append(self._bar)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The terminal may be gone.
        with suppress(OSError):
            self.stop()

    def stop(self) -> None:
        """Removes the bar before the end of the block, as when text begins."""
        if self._bar in _shown:
            _shown.remove(self._bar)
            self._bar.stop()
            if _shown:
                _shown[-1].start()


def say(text: str, indent: int = 0) -> None:
    """Prints a line on stderr, above the bar, unless the output is closed.

    On a terminal it is broken between words, with `indent` spaces before the rest.
    """
    text, console = printable(text, keep="\n"), Console(stderr=True)
    if console.is_terminal:
        # A full line would be followed by an empty one.
        width = max(console.width - 1, 20)
        space = " " * min(indent, width // 2)
        broken = [
            textwrap.fill(
                line,
                width,
                subsequent_indent=space,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in text.split("\n")
        ]
        text = "\n".join(broken)
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard()


def say_all(lines: Sequence[tuple[str, str]]) -> None:
    """Prints names and what is known of each, one below the other."""
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        say(f"{name:{width}}  {text}", width + 2)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints the warnings of memjax, each once, as a status in the `with` block."""
    logger, handler = logging.getLogger("memjax"), _Lines(logging.WARNING)
    # The header of a run counts the documents that are left out.
    handler.addFilter(lambda record: record.name != "memjax.data.batches.pipeline")
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _Lines(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        # A command may read a file twice, as a tokenizer.
        if (text := record.getMessage()) not in self._said:
            self._said.add(text)
            say(f"warning: {text}", 9)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def size(count: int | float) -> str:
    """Bytes in the unit that keeps the number short."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.4g} {units[0]}"


def _discard() -> None:
    """Redirects further output to the null device, if it has a descriptor."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class _Details(ProgressColumn):
    """As many of the parts as the line has room for; before the first, the time."""

    def __init__(self, console: Console):
        self._console = console
        super().__init__()

    def render(self, task: Task) -> Text:
        parts = task.fields["parts"] or [f"{task.elapsed or 0:.0f} s"]
        # One column between each of the three, and the last one is left free.
        room = self._console.width - len(task.description) - BAR - 3
        text = parts[0]
        for part in parts[1:]:
            if len(text) + 2 + len(part) > room:
                break
            text += f"  {part}"
        return Text(text, no_wrap=True)
