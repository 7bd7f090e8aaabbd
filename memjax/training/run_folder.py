"""The folder of a run: its configuration file and its newest checkpoint."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from memjax.config_io import from_record, read_json, to_record
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.checkpoints.folder import check_path
from memjax.training.resume import require_same_config
from memjax.training.step import TrainState

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"


def record_config(config: Any, run_dir: Path, may_change: Collection[str]) -> None:
    """Writes the run's configuration into its folder.

    Raises:
        ValueError: the folder has another run's; the message names the fields that
            differ.
    """
    file, record = run_dir / CONFIG_FILE, to_record(config)
    if file.exists():
        stored = to_record(read_config(type(config), run_dir))
        # Before anything is trained or overwritten in another run's folder.
        require_same_config(stored, record, may_change, str(run_dir))
    # The folder is shared: one process writes, which must hold the folder's claim.
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(record, indent=1))


def read_config(kind: type, run_dir: Path) -> Any:
    """The configuration that `record_config` wrote, a dataclass of the kind.

    Raises:
        ValueError: if the folder is no run, or its configuration is of another kind.
    """
    check_path("run_dir", run_dir)
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"run_dir={str(run_dir)!r} holds no run: no {CONFIG_FILE} in it"
        )
    try:
        record = read_json(file)
    except ValueError as error:
        raise ValueError(
            f"{error}. The run's own training command writes it again if you delete "
            "it; the checkpoints do not need it"
        ) from error
    return from_record(kind, record, f"{file}: config")


def newest_state(run_dir: Path, state: TrainState) -> TrainState:
    """The newest good checkpoint of a run, of the shapes of `state`.

    Raises:
        ValueError: if there is none, or it is unreadable or of another state.
    """
    with Checkpoints(run_dir / CHECKPOINTS) as checkpoints:
        restored = checkpoints.restore(state)
    if restored is None:
        raise ValueError(f"run_dir={str(run_dir)!r} has no checkpoint yet")
    return restored.state
