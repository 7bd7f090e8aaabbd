"""A command's own process: signals before and after training, compiled programs."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

from memjax.data.documents.tokens import default_cache_dir
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


def keep_programs(where: str | None = None) -> None:
    """Keeps what is compiled on the disk, for the next command.

    Args:
        where: a folder, or "off". None is that of JAX_COMPILATION_CACHE_DIR, or else
            `compiled` in the user's cache folder.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
    elif where is not None:
        folder = Path(where).expanduser().resolve()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    elif not jax.config.values["jax_compilation_cache_dir"]:
        folder = default_cache_dir() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
