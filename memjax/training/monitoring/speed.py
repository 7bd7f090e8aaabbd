"""How fast a run goes, from one line of its log to the next."""

import time

from memjax.training.monitoring.device_peaks import memory_in_use, peak_flops
from memjax.training.monitoring.goodput import Goodput


class Speed:
    """Measures steps, leaving out what is paused.

    Args:
        step: from which it measures.
        tokens_per_step: over all devices.
        flops_per_step: that the model needs, over all devices; None says no MFU.
        goodput: counts the time of steps.
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
        """Of the time since the last line, so much was no training."""
        self._since += seconds

    def mark(self, step: int) -> None:
        """Counts the time up to a step that is about to be saved."""
        self._count()
        self._goodput.mark(step)

    def line(self, step: int) -> dict[str, float]:
        """What has been measured since the last line, per step.

        Values: `step_seconds`, `tokens_per_second`, and `mfu`, the share of the
        devices' peak that the model's operations make up, where both are known; none of
        these where no step was dispatched since then. `goodput`, and the GiB of memory
        in use and at most so far, where the device counts them.
        """
        found = {}
        steps, elapsed = step - self._step, self._elapsed()
        # Pauses may be longer than what is left, by the resolution of the clock.
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
        """Adds the time that was not yet counted."""
        elapsed = max(self._elapsed(), self._counted)
        self._goodput.add(elapsed - self._counted)
        self._counted = elapsed
