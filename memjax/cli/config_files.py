"""Configurations from the files of earlier runs, for `--config FILE`."""

from pathlib import Path
from typing import Any

from memjax.buckets.bucket import as_path
from memjax.config_io import from_record, read_json
from memjax.training.config import RunConfig
from memjax.training.finetune.run import FinetuneRun
from memjax.training.finetune.stage import Stage

#: A field that only fine-tuning has tells the two kinds of run apart.
FINETUNING = "backbone_digest"


def read_training(file: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of a training run, and no further options.

    Raises:
        ValueError: the file is no configuration of one, or of another version.
    """
    record = _read(file)
    if FINETUNING in record:
        raise ValueError(
            f"--config {file} is of a fine-tuning run: use memjax finetune --config"
        )
    return _built(RunConfig, record, file), {}


def read_finetuning(file: Path) -> tuple[Stage, dict[str, Any]]:
    """The stage of a fine-tuning run, and its backbone if it began with one.

    Raises:
        ValueError: the file is no configuration of one, or of another version.
    """
    record = _read(file)
    if "optimizer" in record and FINETUNING not in record:
        raise ValueError(f"--config {file} is of a training run: use memjax train")
    run: FinetuneRun = _built(FinetuneRun, record, file)
    # A later stage needs the folder of the stage before: --start.
    known = run.origin and not run.start_digest
    return run.config, {"backbone": run.origin} if known else {}


def is_finetuning(file: Path) -> bool:
    """Whether a configuration is of a fine-tuning run.

    Raises:
        ValueError: the file is no configuration.
    """
    return FINETUNING in _read(file)


def _read(file: Path) -> dict[str, Any]:
    path = as_path(file)
    try:
        record = read_json(path / "config.json" if path.is_dir() else path)
    except FileNotFoundError:
        raise ValueError(f"--config {path} is not there") from None
    if not isinstance(record, dict):
        raise ValueError(f"--config {file} must be an object of JSON")
    return record


def _built(kind: type, record: dict[str, Any], file: Path) -> Any:
    try:
        return from_record(kind, record, "config")
    except ValueError as error:
        raise ValueError(
            f"--config {file} is not a configuration of this version of memjax: {error}"
        ) from error
