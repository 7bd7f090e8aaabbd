"""Progress of a command, on stderr: stdout can be redirected."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

#: Seconds between lines without a terminal.
PAUSE = 30.0


class Progress:
    """A bar on a terminal until the block ends, else a line every half minute.

    Called with the amount done and the total.

    Args:
        what: the work.
        unit: of the amounts.
        pause: seconds between lines, and before the first one.
    """

    def __init__(self, what: str, unit: str, *, pause: float = PAUSE):
        self._what, self._unit, self._pause = what, unit, pause
        self._start = self._last = time.monotonic()
        self._task: TaskID | None = None
        self._bar = Bar(
            TextColumn(what),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._on_terminal = self._bar.console.is_terminal

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        text = f"{done:,} of {total:,} {self._unit}"
        if seconds := now - self._start:
            text += f", {done / seconds:,.0f} a second"
        if self._on_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", text=text)
            self._bar.update(self._task, completed=done, total=total, text=text)
        elif now - self._last >= self._pause:
            self._last = now
            print(f"{self._what}: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        if self._on_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._bar.stop()
