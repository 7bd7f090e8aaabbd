"""Speed of a run between two lines of its log."""

import time

from memjax.training.monitoring.device_peaks import memory_in_use, peak_flops
from memjax.training.monitoring.goodput import Goodput


class Speed:
    """Measures the time of steps, without pauses.

    Args:
        step: first step to measure from.
        tokens_per_step: over all devices.
        flops_per_step: of the model, over all devices; None for no MFU.
        goodput: gets the time of steps.
    """

    def __init__(
        self,
        step: int,
        tokens_per_step: int,
        flops_per_step: float | None,
        goodput: Goodput,
    ):
        self._tokens, self._flops = tokens_per_step, flops_per_step
        self._goodput = goodput
        self.start(step)

    def start(self, step: int) -> None:
        """Measures from this step on."""
        self._step, self._since = step, time.perf_counter()
        self._counted = 0.0

    def leave_out(self, seconds: float) -> None:
        """Excludes seconds from the time since the last line."""
        self._since += seconds

    def mark(self, step: int) -> None:
        """Adds the time up to a step that is about to be saved."""
        self._count()
        self._goodput.mark(step)

    def line(self, step: int) -> dict[str, float]:
        """Measurements per step since the last line.

        Values: `step_seconds`, `tokens_per_second`, and `mfu` (model FLOPs
        utilisation) where the peak is known, if a step was dispatched since then;
        `goodput`, and GiB of memory in use and at most, where the device counts them.
        """
        found = {}
        steps, elapsed = step - self._step, self._elapsed()
        # Pauses may exceed the elapsed time by the resolution of the clock.
        if steps > 0 and elapsed > 0:
            self._count()
            self.start(step)
            found["step_seconds"] = elapsed / steps
            found["tokens_per_second"] = steps * self._tokens / elapsed
            if self._flops and (peak := peak_flops()):
                found["mfu"] = steps * self._flops / elapsed / peak
        return found | {"goodput": self._goodput.share()} | memory_in_use()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._since

    def _count(self) -> None:
        """Adds the time not yet counted to goodput."""
        elapsed = max(self._elapsed(), self._counted)
        self._goodput.add(elapsed - self._counted)
        self._counted = elapsed
