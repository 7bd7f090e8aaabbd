"""Traces of a few training steps, for a profile viewer."""

import contextlib
from pathlib import Path

import jax
from jaxtyping import PyTree


class Profile:
    """A profiler trace of some steps."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._steps, self._folder, self._running = steps, folder, False

    def start(self, step: int) -> None:
        """Starts if `step`, about to be done, is the first one wanted."""
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def stop_after(self, step: int, state: PyTree) -> None:
        """Stops if `step`, just begun, is the last one wanted."""
        if self._steps and step == self._steps[1]:
            self.stop(state)

    def stop(self, state: PyTree) -> None:
        """Stops if running, once `state` is computed."""
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError):  # a failed step shows elsewhere
                jax.block_until_ready(state)
            jax.profiler.stop_trace()
