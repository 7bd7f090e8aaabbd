"""How far a command is, on stderr, so that what it prints can be redirected."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

#: Seconds between lines where no terminal shows a bar.
PAUSE = 30.0


class Progress:
    """A bar on a terminal, else a line every half minute; gone when the block ends.

    Called with how much is done and how much there is in all.

    Args:
        what: is being done.
        unit: that is counted.
        pause: seconds between lines, and before the first one.
    """

    def __init__(self, what: str, unit: str, *, pause: float = PAUSE):
        self._what, self._unit, self._pause = what, unit, pause
        self._start = self._last = time.monotonic()
        self._task: TaskID | None = None
        self._bar = Bar(
            TextColumn(what),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[said]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._on_terminal = self._bar.console.is_terminal

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        said = f"{done:,} of {total:,} {self._unit}"
        if seconds := now - self._start:
            said += f", {done / seconds:,.0f} a second"
        if self._on_terminal:
            if self._task is None:
                self._task = self._bar.add_task("", said=said)
            self._bar.update(self._task, completed=done, total=total, said=said)
        elif now - self._last >= self._pause:
            self._last = now
            print(f"{self._what}: {said}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        if self._on_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on_terminal:
            self._bar.stop()
