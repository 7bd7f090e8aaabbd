"""Progress, `metrics.jsonl`, other writers, and profiler traces of a run.

`metrics.jsonl` has one JSON object a line: `step`, `kind` ("train" or
"evaluation"), `time` (seconds since 1970) and `values`, where a value that is not
finite is null. Each step has one record per kind: on resuming, lines after the restored
step are dropped, as those steps are repeated.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from memjax.training.monitoring.goodput import Goodput
from memjax.training.monitoring.metrics_files import (
    METRICS_FILE,
    Appender,
    keep_lines_until,
)
from memjax.training.monitoring.speed import Speed
from memjax.training.monitoring.writers import open_writers


class Reporter:
    """Writes the metrics of a run, in process 0 alone.

    Args:
        run_dir: folder of the run, created if need be.
        step: of the start, 0 or the restored one.
        steps: the last step of the run, for the progress bar and the time left.
        tokens_per_step: tokens in one batch over all devices, for tokens/s.
        console: where to print; standard output unless given.
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
        console: Console | None = None,
        writers: Sequence[str] = ("tensorboard",),
        record: Mapping[str, Any] | None = None,
        flops_per_step: float | None = None,
    ):
        self._steps = steps
        self._console = console or Console()
        self._evaluated: set[int] = set()
        self._writes = jax.process_index() == 0
        self._bar: Progress | None = None
        if not self._writes:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        entries = keep_lines_until(run_dir / METRICS_FILE, step)
        self._evaluated = {e["step"] for e in entries if e["kind"] == "evaluation"}
        self._writers = open_writers(writers, run_dir, step, record or {})
        self._file = Appender(run_dir / METRICS_FILE)
        self._goodput = Goodput(run_dir, step)
        self._speed = Speed(step, tokens_per_step, flops_per_step, self._goodput)
        if self._console.is_terminal:
            self._bar = _progress_bar(self._console)
            self._task = self._bar.add_task("", total=steps, completed=step, text="")

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
        self._show(step, _progress_text(timed, self._steps - step))

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Records and prints the values of an evaluation after `step`."""
        self._record(step, "evaluation", values)
        self._evaluated.add(step)
        self.message(f"step {step}: evaluation " + _pairs(values))

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` is recorded; only process 0 knows."""
        return step in self._evaluated

    def message(self, text: str) -> None:
        """Prints one line, unless the output is closed."""
        if not self._writes:
            return
        if self._bar is None:
            print_line(text, self._console.file)
            return
        try:
            # Above the bar, without colours for numbers or markup in [].
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            _discard_output(self._console.file)

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
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            # The terminal may be gone.
            with suppress(OSError):
                self._bar.stop()
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

    def _show(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        else:
            self.message(f"step {step}/{self._steps} {text}")


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


def print_line(text: str, file: Any = None) -> None:
    """Prints a line, unless the output is closed.

    Not by rich, which ends the program if a pipe is closed.
    """
    stream: IO[str] = sys.stdout if file is None else file
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _discard_output(stream)


def _discard_output(file: IO[str]) -> None:
    """Redirects all further output to the null device.

    Files without a descriptor are left alone.
    """
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    )


def _progress_text(values: Mapping[str, float], steps_left: int) -> str:
    text = f"loss {values['loss']:.4f}"
    if "learning_rate" in values:
        text += f"  lr {values['learning_rate']:.2e}"
    if "step_seconds" in values:
        text += f"  {values['step_seconds']:.3g} s/step"
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in values:
        text += f"  MFU {values['mfu']:.1%}"
    if "hbm_gib" in values:
        text += f"  HBM {values['hbm_gib']:.1f} GiB"
    if "step_seconds" in values:
        text += f"  ETA {_duration(values['step_seconds'] * steps_left)}"
    if values.get("skipped_steps"):
        text += f"  {values['skipped_steps']:.0f} skipped"
    return text


def _pairs(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in values.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
