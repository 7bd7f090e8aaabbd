"""The training loop: batches, updates, metrics, evaluations and checkpoints.

Everything that a run needs to resume is in its checkpoints: the state with its step,
the position in the data, the counts of skipped steps, and the record of the
configuration. Running the same command again resumes bit for bit from the newest good
checkpoint, whatever ended the run before.

How a run ends:

    finished      all steps are done                          exit code 0
    out of time   the budget of minutes is used up            exit code 0
    preempted     SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C came;
                  the state is saved                          exit code 75
    an exception  too many non-finite steps, a failed save, bad input
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import PyTree

from memjax.checks import require_instance
from memjax.config_io import AnyPath
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.checkpoints.folder import RetryableError
from memjax.training.config import DataIterator, LoopConfig, Outcome, Reason
from memjax.training.distributed.multihost import StopSignals, agreed, same_everywhere
from memjax.training.monitoring.reporting import Profile, Reporter
from memjax.training.monitoring.watchdog import Watchdog
from memjax.training.monitoring.writers import require_installed
from memjax.training.resume import FREE_FIELDS, Start, finite_flag, resume
from memjax.training.run_folder import RunFolder

#: Steps whose metrics may still be on the device. Reading a metric this late
#: never makes the device wait for the host.
LAG = 2
#: Seconds that a save waits for room on a disk or an answer of a bucket, and between
#: two tries.
ROOM_SECONDS, RETRY_SECONDS = 600.0, 5.0


def train(
    train_step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: PyTree,
    data: DataIterator,
    config: LoopConfig,
    run_dir: AnyPath | str | RunFolder,
    *,
    config_record: dict[str, Any],
    tokens_per_step: int,
    evaluate: Callable[[Any, Callable[[], bool]], dict[str, float]] | None = None,
    step_of: Callable[[Any], Any] = lambda state: state.step,
    may_change: Collection[str] = FREE_FIELDS,
    completed: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda record: record,
    flops_per_step: float | None = None,
) -> tuple[Any, Outcome]:
    """Trains to `config.steps`, from the newest checkpoint in `run_dir` if any.

    Args:
        train_step: `(state, batch) -> (state, metrics)`, jitted and pure; may donate
            its state. Metrics are scalars: "loss", "finite" (0 where the update was
            skipped because loss or gradients were not finite) and any others. The
            step in the state goes up by one in every call, skipped or not.
        state: of a new run. Its arrays are consumed: donated to `train_step`, or freed
            for those of a checkpoint.
        data: the batches; its position is saved and restored.
        config: see `LoopConfig`.
        run_dir: the folder of the run, or its URL in a bucket; gets `checkpoints/`,
            `metrics.jsonl`, `tensorboard/` and `profile/`. An opened one is not closed.
        config_record: the configuration as JSON, stored in the checkpoints; must be the
            same on resuming.
        tokens_per_step: tokens in a batch, over all devices.
        evaluate: `(state, should_stop) -> values`; should return early once
            `should_stop()` is true, and its values are then not recorded.
        step_of: finds the step, an integer scalar, in the state.
        may_change: fields of `config_record`, dotted when nested, that may differ.
            A changed learning rate is reported.
        completed: adds fields introduced since to a checkpoint's record, with values
            equivalent to the earlier behaviour.
        flops_per_step: that the model needs, over all devices; None reports no MFU.

    Returns:
        The state, which is in a checkpoint by then, and the outcome.

    Raises:
        LockedError: another process trains in `run_dir`; nothing was written.
        ValueError: `config_record` or the state contradicts the checkpoint; metrics
            are not as above; the data ended before `config.steps` (after saving); a
            writer's package is missing, or its service refuses the run.
        CheckpointError: all checkpoints are damaged.
        NonFiniteError: `config.max_nan_steps` consecutive steps were skipped.
        SaveError: a checkpoint could not be written; RetryableError if the disk stays
            full, or the bucket refuses, for ten minutes.
    """
    require_instance("config", config, LoopConfig)
    require_installed(config.writers)
    # Before resuming, which counts among the minutes.
    started = time.monotonic()
    deadline = started + 60 * config.minutes if config.minutes else None
    opened = isinstance(run_dir, RunFolder)
    with (
        StopSignals() as signals,
        nullcontext(run_dir) if opened else RunFolder(run_dir) as folder,
        Checkpoints(folder.checkpoints, keep=config.keep) as checkpoints,
        Watchdog(config.watchdog_minutes) as watch,
    ):
        start = resume(
            checkpoints, state, data, config_record, may_change, step_of, completed
        )
        settings = _RunSettings(
            train_step, data, evaluate, config, folder, config_record, step_of
        )
        # Now rather than at the first save, hours later.
        checkpoints.require_room(start.state)
        reporter = Reporter(
            folder.files,
            step=start.step,
            steps=config.steps,
            tokens_per_step=tokens_per_step,
            writers=config.writers,
            record=config_record,
            flops_per_step=flops_per_step,
        )
        services = _Services(signals, checkpoints, reporter, watch)
        loop = _Loop(settings, start, services, started, deadline)
        # Only the loop may hold a reference to the state, which `train_step` donates: a
        # second one would keep a copy of the arrays alive.
        del state, start
        with reporter:
            return loop.train_to_end()


class _RunSettings(NamedTuple):
    """Constant arguments of `train`."""

    train_step: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    data: Any
    evaluate: Callable[[Any, Callable[[], bool]], dict[str, float]] | None
    config: LoopConfig
    folder: RunFolder
    record: dict[str, Any]
    step_of: Callable[[Any], Any]


class _Services(NamedTuple):
    """Services of a run."""

    signals: StopSignals
    checkpoints: Checkpoints
    reporter: Reporter
    watch: Watchdog


class _Loop:
    """Mutable part of a run: state, step, skipped steps, metrics on the device."""

    def __init__(
        self,
        settings: _RunSettings,
        start: Start,
        services: _Services,
        started: float,
        deadline: float | None,
    ):
        self._settings, self._started, self._deadline = settings, started, deadline
        self._signals, self._checkpoints, self._reporter, self._watch = services
        self._profile = Profile(
            settings.config.profile, settings.folder.files / "profile"
        )
        self._state, self._step, self._skipped = start.state, start.step, start.skipped
        self._saved = start.step if start.restored else None
        self._changes = start.changes
        self._pending: deque[tuple[int, dict[str, Any]]] = deque()
        self._clock_started = False
        self._save_is_due = False

    def train_to_end(self) -> tuple[Any, Outcome]:
        if self._saved is not None:
            so_far = f"resumed at step {self._step}"
            changes = [so_far, *self._changes, self._reporter.so_far()]
            self._reporter.message("; ".join(changes))
        try:
            reason = self._train_until_stopped()
        finally:
            # Also after an exception, or the profiler would stay on.
            self._profile.stop(self._state)
        with self._signals.protected():
            self._read_metrics(keep=0)
            self._save()
            try:
                self._checkpoints.wait()
            except RetryableError as error:
                self._retry_save(error)
        if reason == "data ended":
            raise ValueError(
                f"the data ended after step {self._step}, before steps = "
                f"{self._settings.config.steps}; the state is saved"
            )
        if reason == "finished" and not self._evaluate_if_due():
            reason = "preempted"
        self._reporter.message(f"{reason} at step {self._step}, state saved")
        return self._state, Outcome(reason, self._step, self._skipped.total)

    def _train_until_stopped(self) -> Reason | Literal["data ended"]:
        # An evaluation is recorded only when complete: one that was due at the restored
        # step and was interrupted is repeated here.
        if self._saved is not None and not self._evaluate_if_due():
            return "preempted"
        first = True
        while (reason := self._reason_to_stop()) is None:
            self._profile.start(self._step + 1)
            self._watch.waits(self._step + 1, "its batch")
            try:
                batch = next(self._settings.data)
            except StopIteration:
                return "data ended"
            self._watch.waits(self._step + 1, "the devices")
            metrics = self._first_step(batch) if first else self._next_step(batch)
            first = False
            self._step += 1
            self._queue_metrics(metrics)
            self._profile.stop_after(self._step, self._state)
            # A failed save ends the run at once, and not only when the next one is due.
            try:
                self._checkpoints.check()
            except RetryableError as error:
                self._retry_save(error)
            self._save_if_due()
            if self._step < self._settings.config.steps and not self._evaluate_if_due():
                return "preempted"
        return reason

    def _next_step(self, batch: Any) -> dict[str, Any]:
        # By this a trace's viewer knows where a step begins.
        with jax.profiler.StepTraceAnnotation("train", step_num=self._step + 1):
            self._state, metrics = self._settings.train_step(self._state, batch)
        return metrics

    def _first_step(self, batch: Any) -> dict[str, Any]:
        """The step that compiles, with its status and a message after it."""
        self._watch.rests()
        start = time.perf_counter()
        # Returns when the program is compiled and dispatched, and not when it is done.
        with self._reporter.phase("compiling"):
            metrics = self._next_step(batch)
        self._signals.keep()
        self._reporter.message(f"compiled in {time.perf_counter() - start:.1f} s")
        return metrics

    def _reason_to_stop(self) -> Reason | None:
        if self._step >= self._settings.config.steps:
            return "finished"
        if self._signals.should_stop():
            return "preempted"
        return "out of time" if self._out_of_time() else None

    def _out_of_time(self) -> bool:
        if self._deadline is None:
            return False
        past_deadline = time.monotonic() >= self._deadline
        if jax.process_count() == 1:
            return past_deadline
        # Agreeing is a collective that waits for every process, so not at every step.
        at_log_step = self._step % self._settings.config.log_every == 0
        return at_log_step and agreed(past_deadline)

    def _queue_metrics(self, metrics: dict[str, Any]) -> None:
        # Starts the transfer now, so that the later `device_get` need not wait.
        for leaf in jax.tree.leaves(metrics):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        self._pending.append((self._step, metrics))
        self._read_metrics(keep=LAG)

    def _read_metrics(self, *, keep: int) -> None:
        """Counts and logs the queued steps, oldest first, until `keep` are left."""
        config = self._settings.config
        while len(self._pending) > keep:
            step, on_device = self._pending.popleft()
            self._watch.waits(step, "the devices")
            metrics = jax.device_get(on_device)
            finite = finite_flag(metrics, step)
            self._skipped = self._skipped.after(
                step, finite=finite, limit=config.max_nan_steps
            )
            if not finite:
                self._reporter.message(
                    f"step {step}: loss or gradients not finite, update skipped "
                    f"({self._skipped.in_row} in a row, {self._skipped.total} in all)"
                )
            # The first step contains compilation, which must not count in tokens/s.
            if not self._clock_started:
                passed = time.monotonic() - self._started
                self._reporter.message(
                    f"first step done {passed:.1f} s after the start"
                )
                self._reporter.start_clock(self._step)
                self._clock_started = True
            if step % config.log_every == 0 or step == config.steps:
                values = {name: float(value) for name, value in metrics.items()}
                values["skipped_steps"] = float(self._skipped.total)
                self._reporter.log(step, values, dispatched=self._step)

    def _save_if_due(self) -> None:
        """Saves at the configured interval, but not while steps are skipped in a row.

        Parameters may be ruined by then though finite: earlier checkpoints must not be
        deleted for them.
        """
        self._save_is_due |= self._step % self._settings.config.save_every == 0
        if not self._save_is_due:
            return
        self._read_metrics(keep=0)
        if not self._skipped.in_row:
            self._save()
            self._save_is_due = False

    def _save(self) -> None:
        """Starts a checkpoint of this step, unless there is one."""
        try:
            self._start_save()
        except RetryableError as error:
            self._retry_save(error)

    def _retry_save(self, error: RetryableError) -> None:
        """Tries again for minutes: the steps since the last save are nowhere else."""
        # The others wait for this process inside the checkpoint library, which knows no
        # second try of one of them: only a new start brings them together.
        if jax.process_count() > 1:
            raise error
        minutes = ROOM_SECONDS / 60
        said = error.strerror or str(error)
        self._reporter.message(f"{said}; trying again for {minutes:.0f} minutes")
        deadline = time.monotonic() + ROOM_SECONDS
        while time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
            self._saved = None
            try:
                self._start_save()
                self._checkpoints.wait()
                return
            except RetryableError as found:
                error = found
        raise error

    def _start_save(self) -> None:
        # At step 0 there is nothing to lose: the run would start from the same state.
        if self._step in (self._saved, 0):
            return
        # The count of skipped steps is part of the checkpoint, so it must be complete.
        self._read_metrics(keep=0)
        if int(self._settings.step_of(self._state)) != self._step:
            raise ValueError(
                f"after {self._step} steps the state is at step "
                f"{int(self._settings.step_of(self._state))}: train_step must count "
                "every call, skipped or not"
            )
        self._watch.rests()
        # Metrics first: a checkpoint must not be ahead of the record of its steps.
        self._reporter.sync(self._step)
        self._settings.folder.push()
        meta = {
            "config": self._settings.record,
            "data": same_everywhere(self._settings.data.get_state()),
            "skipped": list(self._skipped),
        }
        with self._reporter.paused(), self._signals.protected():
            # Skipped steps at the end of a run: keep the earlier checkpoints too.
            in_peace = not self._skipped.in_row
            self._checkpoints.save(self._step, self._state, meta, drop_old=in_peace)
        self._saved = self._step

    def _evaluate_if_due(self) -> bool:
        """Evaluates if this step is due and not yet evaluated; False if interrupted."""
        config, evaluate = self._settings.config, self._settings.evaluate
        if evaluate is None or config.evaluate_every == 0:
            return True
        is_last = self._step >= config.steps
        if not is_last and (self._step % config.evaluate_every or self._step == 0):
            return True
        # Only process 0 has the record of evaluations; all must take the same branch.
        if agreed(self._reporter.evaluated(self._step)):
            return True
        self._read_metrics(keep=0)
        self._watch.rests()
        with self._reporter.paused():
            values = evaluate(self._state, self._signals.should_stop)
        if self._signals.should_stop():
            return False
        self._reporter.log_evaluation(
            self._step, {name: float(value) for name, value in values.items()}
        )
        return True
