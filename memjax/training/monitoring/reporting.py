"""Progress, `metrics.jsonl`, other writers, and profiler traces of a run.

`metrics.jsonl` has one JSON object a line: `step`, `kind` ("train" or
"evaluation"), `time` (seconds since 1970) and `values`, where a value that is not
finite is null. Each step has one record per kind: on resuming, lines after the restored
step are dropped, as those steps are repeated.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from memjax.status import Status, duration, say
from memjax.training.monitoring.goodput import Goodput
from memjax.training.monitoring.metrics_files import (
    METRICS_FILE,
    Appender,
    keep_lines_until,
)
from memjax.training.monitoring.speed import Speed
from memjax.training.monitoring.writers import open_writers

#: Seconds left of a run that are mentioned after its first steps.
MENTIONED = 10.0


class Reporter:
    """Writes the metrics of a run, in process 0 alone.

    Args:
        run_dir: folder of the run, created if need be.
        step: of the start, 0 or the restored one.
        steps: the last step of the run, for the progress bar and the time left.
        tokens_per_step: tokens in one batch over all devices, for tokens/s.
        writers: besides `metrics.jsonl`; see `LoopConfig`.
        record: the run's configuration, for writers that show it.
        flops_per_step: operations of a step over all devices, for MFU.

    Raises:
        ValueError: a writer refuses the run.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        step: int,
        steps: int,
        tokens_per_step: int,
        writers: Sequence[str] = ("tensorboard",),
        record: Mapping[str, Any] | None = None,
        flops_per_step: float | None = None,
    ):
        self._steps = steps
        self._evaluated: set[int] = set()
        self._writes = jax.process_index() == 0
        self._status = Status("step", total=steps, done=step, quiet=not self._writes)
        self._estimated = False
        if not self._writes:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        entries = keep_lines_until(run_dir / METRICS_FILE, step)
        self._evaluated = {e["step"] for e in entries if e["kind"] == "evaluation"}
        self._writers = open_writers(writers, run_dir, step, record or {})
        self._file = Appender(run_dir / METRICS_FILE)
        self._goodput = Goodput(run_dir, step)
        self._speed = Speed(step, tokens_per_step, flops_per_step, self._goodput)

    def start_clock(self, step: int) -> None:
        """Measures speed from this step on, after the one that compiles."""
        if self._writes:
            self._speed.start(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent in the `with` block from the speed."""
        start = time.perf_counter()
        yield
        if self._writes:
            self._speed.leave_out(time.perf_counter() - start)

    def log(
        self, step: int, values: Mapping[str, float], *, dispatched: int | None = None
    ) -> None:
        """Records a training step and shows it with its speed and the time left.

        Args:
            step: of the metrics.
            values: the metrics.
            dispatched: the last dispatched step, `step` unless given. Metrics are read
                some steps late: speed counts the steps dispatched between two lines.
        """
        if not self._writes:
            return
        timed = {**values, **self._speed.line(dispatched or step)}
        self._record(step, "train", timed)
        seconds = timed.get("step_seconds")
        left = None if seconds is None else seconds * (self._steps - step)
        if left is not None and left >= MENTIONED and not self._estimated:
            self._estimated = True
            said = f"about {duration(left)} to step {self._steps:,}"
            self.message(f"{said}, without evaluations")
        self._status(step, self._steps, *_details(timed), left=left)

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Records and prints the values of an evaluation after `step`."""
        self._record(step, "evaluation", values)
        self._evaluated.add(step)
        self.message(f"step {step}: evaluation " + _pairs(values))

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` is recorded; only process 0 knows."""
        return step in self._evaluated

    def message(self, text: str) -> None:
        """Prints one line."""
        if self._writes:
            say(text)

    def phase(self, what: str) -> Status:
        """The status of other work than steps, as a context."""
        return Status(what, quiet=not self._writes)

    def sync(self, step: int) -> None:
        """Puts all metrics on the disk, before `step` is saved."""
        if not self._writes:
            return
        self._speed.mark(step)
        self._file.sync()
        for writer in self._writers:
            writer.sync()

    def so_far(self) -> str:
        """Number of starts, and goodput."""
        if not self._writes:
            return ""
        return f"start {self._goodput.starts}, goodput {self._goodput.share():.1%}"

    def __enter__(self) -> "Reporter":
        self._status.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.__exit__()
        if self._writes:
            self._file.close()
            for writer in self._writers:
                writer.close()

    def _record(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        if not self._writes:
            return
        entry = {
            "step": step,
            "kind": kind,
            "time": round(time.time(), 3),
            "values": {k: v if math.isfinite(v) else None for k, v in values.items()},
        }
        self._file.append(json.dumps(entry, allow_nan=False).encode() + b"\n")
        for writer in self._writers:
            writer.add(kind, step, values)


class Profile:
    """A profiler trace of some steps."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._steps, self._folder, self._running = steps, folder, False

    def start(self, step: int) -> None:
        """Starts the trace if `step`, about to begin, is the first to be traced."""
        if self._steps and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def stop_after(self, step: int, state: PyTree) -> None:
        """Stops the trace if `step`, just dispatched, is the last to be traced."""
        if self._steps and step == self._steps[1]:
            self.stop(state)

    def stop(self, state: PyTree) -> None:
        """Stops a running trace once `state` is computed."""
        if self._running:
            self._running = False
            # A failed step raises at the use of its state; here it would hide that.
            with suppress(RuntimeError):
                jax.block_until_ready(state)
            jax.profiler.stop_trace()


def _details(values: Mapping[str, float]) -> list[str]:
    """The metrics of a status line, the most important first."""
    found = [f"loss {values['loss']:.4f}"]
    if values.get("skipped_steps"):
        found.append(f"{values['skipped_steps']:.0f} skipped")
    if "step_seconds" in values:
        found.append(f"{values['step_seconds']:.3g} s/step")
    if "learning_rate" in values:
        found.append(f"lr {values['learning_rate']:.2e}")
    if "step_seconds" in values:
        found.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in values:
        found.append(f"MFU {values['mfu']:.1%}")
    if "hbm_gib" in values:
        found.append(f"HBM {values['hbm_gib']:.1f} GiB")
    return found


def _pairs(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in values.items())
