"""What a run reports: progress, `metrics.jsonl`, TensorBoard, profiler traces.

`metrics.jsonl` has one JSON object a line: `step`, `kind` ("train" or
"evaluation"), `time` (seconds since 1970) and `values`, where a value that is not
finite is null. Each step is recorded once per kind, however often the run was
interrupted: on resuming, the lines after the restored step are dropped, because those
steps are repeated.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)


class Reporter:
    """Writes the metrics of one run; only process 0 writes or prints anything.

    Args:
        run_dir: folder of the run, created if need be.
        step: the step that training starts from, 0 or the restored one.
        steps: the last step of the run, for the progress bar and the time left.
        tokens_per_step: tokens in one batch over all devices, for tokens/s.
        console: where to print; standard output unless given.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        step: int,
        steps: int,
        tokens_per_step: int,
        console: Console | None = None,
    ):
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._console = console or Console()
        self._clock = _Clock(step)
        self._evaluated: set[int] = set()
        self._writes = jax.process_index() == 0
        self._bar: Progress | None = None
        if not self._writes:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        entries = _drop_lines_after(run_dir / METRICS_FILE, step)
        self._evaluated = {e["step"] for e in entries if e["kind"] == "evaluation"}
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=step + 1, flush_secs=10
        )
        if self._console.is_terminal:
            self._bar = _progress_bar(self._console)
            self._task = self._bar.add_task("", total=steps, completed=step, text="")

    def start_clock(self, step: int) -> None:
        """Measures tokens/s from this step on; the first step contains compilation."""
        self._clock = _Clock(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent in the `with` block from tokens/s."""
        start = time.perf_counter()
        yield
        self._clock.start += time.perf_counter() - start

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records a training step and shows it with its speed and the time left."""
        seconds = self._clock.seconds_per_step(step)
        timed = dict(values)
        if seconds is not None:
            timed["tokens_per_second"] = self._tokens_per_step / seconds
        self._record(step, "train", timed)
        self._show(step, _progress_text(timed, seconds, self._steps - step))

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Records and prints what an evaluation after `step` found."""
        self._record(step, "evaluation", values)
        self._evaluated.add(step)
        self.message(f"step {step}: evaluation " + _pairs(values))

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` is recorded; only process 0 knows."""
        return step in self._evaluated

    def message(self, text: str) -> None:
        """Prints one line."""
        if self._writes:
            # Rich would otherwise colour numbers and interpret [] as markup.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()

    def flush(self) -> None:
        """Flushes the metrics file and the TensorBoard events."""
        if self._writes:
            self._file.flush()
            self._board.flush()

    def __enter__(self) -> "Reporter":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._writes:
            self._file.close()
            self._board.close()

    def _record(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        if not self._writes:
            return
        entry = {
            "step": step,
            "kind": kind,
            "time": round(time.time(), 3),
            "values": {k: v if math.isfinite(v) else None for k, v in values.items()},
        }
        # One write per line, so that a kill leaves at most one incomplete line.
        self._file.write(json.dumps(entry, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

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
            # A failed step raises where its state is used; here it would hide that.
            with suppress(RuntimeError):
                jax.block_until_ready(state)
            jax.profiler.stop_trace()


class _Clock:
    """Mean seconds per step since the previous call of `seconds_per_step`."""

    def __init__(self, step: int):
        self.step = step
        self.start = time.perf_counter()

    def seconds_per_step(self, step: int) -> float | None:
        steps, now = step - self.step, time.perf_counter()
        elapsed = now - self.start
        self.step, self.start = step, now
        # `paused` moves the start forward, so the elapsed time may be 0 or below.
        return elapsed / steps if steps > 0 and elapsed > 0 else None


def _drop_lines_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops entries after `step` and damaged lines from the file; returns the rest."""
    if not path.exists():
        return []
    kept = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if entry["step"] <= step and entry["kind"] and entry["values"]:
                kept.append(entry)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s line %d dropped, not a record: %s", path, number, error)
    # Rewritten under another name and then moved: a kill meanwhile loses nothing.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
    temporary.replace(path)
    return kept


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    )


def _progress_text(
    values: Mapping[str, float], seconds: float | None, steps_left: int
) -> str:
    text = f"loss {values['loss']:.4f}"
    if seconds is not None:
        text += f"  {values['tokens_per_second']:,.0f} tokens/s"
        text += f"  ETA {_duration(seconds * steps_left)}"
    if values.get("skipped_steps"):
        text += f"  {values['skipped_steps']:.0f} skipped"
    return text


def _pairs(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4f}" for name, value in values.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
