"""Runs written whole whose updates change nothing, for tests that need their folders.

To compile an update takes seconds.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memjax.training import pretrain
from memjax.training.finetune import finetune
from memjax.training.monitoring import reporting
from memjax.training.step import TrainState


def _count(state: TrainState, _: Any) -> tuple[TrainState, dict[str, float]]:
    return state._replace(step=state.step + 1), {"loss": 0.0, "finite": 1.0}


@contextlib.contextmanager
def idle_updates(idle: Callable[[Any], bool] = lambda run: True) -> Iterator[None]:
    """Runs that are trained here, if `idle`, end as they began, after all steps.

    None of the runs has writers besides `metrics.jsonl`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (pretrain, finetune):
            patch.setattr(module, "_programs", _idle(module._programs, idle))
        # TensorBoard takes a second to import, and has tests of its own.
        patch.setattr(reporting, "open_writers", lambda *_: [])
        yield


def _idle(programs: Any, idle: Callable[[Any], bool]) -> Any:
    def made(run: Any, *more: Any) -> Any:
        create, update = programs(run, *more)
        return create, _count if idle(run) else update

    return made
