"""Writers of metrics besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

TensorBoard's files are in the run's folder. Weights & Biases and MLflow are optional
packages; the id of a run at their service is stored in the folder, so that a resumed
run continues there. No writer can stop a run that has started.
"""

import importlib
import importlib.util
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from memjax.buckets.writing import write_atomically
from memjax.checks import short
from memjax.config_io import read_json
from memjax.training.monitoring.metrics_files import EventsFile
from memjax.training.resume import flatten

#: Package and extra of each writer.
PACKAGES = {"wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow")}
#: Seconds to wait at the end of a run for values queued at a service.
PATIENCE = 60.0

logger = logging.getLogger(__name__)


@runtime_checkable
class Writer(Protocol):
    """Takes a run's metrics."""

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of one step; `kind` is "train" or "evaluation"."""
        ...

    def sync(self) -> None:
        """Syncs added values to the disk."""
        ...

    def close(self) -> None:
        """Writes everything and ends."""
        ...


@runtime_checkable
class Service(Protocol):
    """A run at a service; its first error is reported, later ones are not."""

    @property
    def id(self) -> str:
        """Id of the run at the service."""
        ...

    def log(self, row: int, step: int, values: Mapping[str, float]) -> None:
        """Logs values of a step; `row` counts calls from 0, over all restarts."""
        ...

    def finish(self) -> None: ...


def require_installed(names: Sequence[str]) -> None:
    """Raises ValueError if a writer's package is missing."""
    for name in names:
        package, install = PACKAGES.get(name, ("tensorboardX", "tensorboardX"))
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"writers={tuple(names)} needs the package {package}: "
                f"pip install {install}"
            )


def open_writers(
    names: Sequence[str], folder: Path, step: int, record: Mapping[str, Any]
) -> list[Writer]:
    """The writers of those names, for the run in `folder`.

    Args:
        names: any of "tensorboard", "wandb" and "mlflow".
        folder: of the run.
        step: that training starts from.
        record: the run's configuration, which services show.

    Raises:
        ValueError: a service cannot be reached, or refuses the run.
    """
    services = {"wandb": WandbRun, "mlflow": MlflowRun}
    opened: list[Writer] = [
        ServiceWriter(name, folder, record, connect)
        for name, connect in services.items()
        if name in names
    ]
    # After those that may refuse.
    if "tensorboard" in names:
        opened.append(EventsFile(folder / "tensorboard", purge_step=step + 1))
    return opened


class ServiceWriter:
    """Sends each step to a service once, even if it is repeated.

    `<name>.json` in the run's folder has the run's number there, the last step sent of
    each kind, and how often something was sent. It is written before a step is sent: a
    kill between the two leaves a step out, and never sends one twice.

    Raises:
        ValueError: the service cannot be reached, or refuses the run.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        record: Mapping[str, Any],
        connect: Callable[[Path, str | None, Mapping[str, Any]], Service],
    ):
        self._name, self._file = name, folder / f"{name}.json"
        known, self._sent, self._rows = self._read()
        try:
            self._service = connect(folder, known, record)
        # The errors of a service are of its own kinds.
        except Exception as error:
            raise ValueError(f"{name} does not take the run: {short(error)}") from error
        self._failing = False
        self._write()

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Sends the values of one step, named `<kind>/<name>`, if they are new."""
        if step <= self._sent.get(kind, 0):
            return
        row, self._rows, self._sent[kind] = self._rows, self._rows + 1, step
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._guarded(self._write)
        self._guarded(lambda: self._service.log(row, step, named))

    def sync(self) -> None:
        """No-op: a service must not delay training."""

    def close(self) -> None:
        """Waits a limited time for queued values, and ends."""
        self._guarded(self._service.finish)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._failing:
                logger.warning(
                    "%s takes no metrics now (%s); training goes on, and metrics.jsonl "
                    "has all of them",
                    self._name,
                    short(error),
                )
            self._failing = True

    def _read(self) -> tuple[str | None, dict[str, int], int]:
        try:
            record = read_json(self._file)
            sent = {str(kind): int(step) for kind, step in record["sent"].items()}
            return str(record["id"]), sent, int(record["rows"])
        except FileNotFoundError:
            return None, {}, 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._file} is damaged ({short(error)}): without it {self._name} "
                "gets a new run; delete it if it shall"
            ) from error

    def _write(self) -> None:
        record = {"id": self._service.id, "sent": self._sent, "rows": self._rows}
        write_atomically(self._file, json.dumps(record))


class WandbRun:
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_MODE, ... are read by it.

    Args:
        folder: of the run, also its name; files are in `wandb/` there.
        known: its number, if it was begun before.
        record: its configuration.
    """

    def __init__(self, folder: Path, known: str | None, record: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "memjax"),
            name=folder.resolve().name,
            id=known,
            resume="allow" if known else None,
            dir=str(folder),
            config=dict(record),
            # The run prints for itself.
            settings=wandb.Settings(console="off"),
        )
        # Its own count must go up with every row, also where two kinds of metrics have
        # one step: else it drops the second.
        self._run.define_metric("*", step_metric="step")
        self.id: str = self._run.id

    def log(self, row: int, step: int, values: Mapping[str, float]) -> None:
        """Hands the values to W&B's own process."""
        self._run.log({"step": step, **values}, step=row)

    def finish(self) -> None:
        """Waits until all are on the disk and, online, sent."""
        self._run.finish()


class MlflowRun:
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in `mlflow.db` of the folder.

    Its experiment is MLFLOW_EXPERIMENT_NAME or "memjax". A thread sends the values.

    Args:
        folder: of the run, also its name.
        known: its number, if it was begun before.
        record: its configuration, which becomes its parameters.
    """

    def __init__(self, folder: Path, known: str | None, record: Mapping[str, Any]):
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        here = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or here
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self.id = known or self._create(folder, record)
        if known:
            self._client.update_run(known, status="RUNNING")
        self._pool = ThreadPoolExecutor(1)
        self._under_way: deque[Future] = deque()

    def log(self, row: int, step: int, values: Mapping[str, float]) -> None:
        """Queues the values; raises errors of earlier ones."""
        now = round(1000 * time.time())
        metrics = [self._entities.Metric(n, v, now, step) for n, v in values.items()]
        send = self._client.log_batch
        self._under_way.append(self._pool.submit(send, self.id, metrics=metrics))
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def finish(self) -> None:
        """Waits a limited time for queued values."""
        wait(self._under_way, PATIENCE)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.set_terminated(self.id)
        for sent in self._under_way:
            sent.result(timeout=0)

    def _create(self, folder: Path, record: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "memjax")
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(name)
        )
        run = self._client.create_run(experiment, run_name=folder.resolve().name)
        params = [
            self._entities.Param(field, str(value)[:500])
            for field, value in flatten(record).items()
        ]
        # 100 is the most that MLflow takes at once.
        for first in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[first : first + 100])
        return run.info.run_id
