"""What a signal does while no training loop is there to save a state."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from memjax.training.config import EXIT_PREEMPTED
from memjax.training.multihost import catchable


@contextmanager
def exits_75() -> Iterator[None]:
    """A signal ends the command with exit code 75: before the first step, say.

    There is nothing to save then. A training loop handles the signals for its time.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        print(f"memjax: {name}; run the same command again", file=sys.stderr)
        raise SystemExit(EXIT_PREEMPTED)

    before = {number: signal.signal(number, stop) for number in catchable()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
