"""What the training loop takes and gives: its settings, its data, how it ended."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from memjax.training.preemption import EXIT_PREEMPTED

Reason = Literal["finished", "out of time", "preempted"]


@runtime_checkable
class DataIterator(Protocol):
    """Batches without end, with a position that JSON can hold.

    With several processes the position must be the same on each of them.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class LoopConfig:
    """How long to train and what to do meanwhile; steps are counted from 1.

    Attributes:
        steps: the step to train to, >= 1; raising it later extends a run.
        save_every: steps between checkpoints, >= 1: what a kill can cost.
        evaluate_every: steps between evaluations, and one after the last step;
            0 for none.
        log_every: steps between lines of `metrics.jsonl`, >= 1.
        keep: checkpoints kept, >= 1.
        max_nan_steps: skipped steps in a row that stop the run, >= 1.
        profile: first and last step of a trace written to `<run>/profile`.
        minutes: stop cleanly this long after `train` was called, > 0.
    """

    steps: int
    save_every: int = 500
    evaluate_every: int = 0
    log_every: int = 10
    keep: int = 3
    max_nan_steps: int = 10
    profile: tuple[int, int] | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "log_every", "keep", "max_nan_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.evaluate_every < 0:
            raise ValueError(f"evaluate_every must be >= 0, got {self.evaluate_every}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be > 0, got {self.minutes}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                f"profile must be two steps with 1 <= first <= last, got {self.profile}"
            )


@dataclass(frozen=True)
class Outcome:
    """How a run ended, the step it stands at, and the steps skipped in all."""

    reason: Reason
    step: int
    skipped_steps: int

    @property
    def exit_code(self) -> int:
        """What the program should exit with: 75 if it should be run again, else 0."""
        return EXIT_PREEMPTED if self.reason == "preempted" else 0
