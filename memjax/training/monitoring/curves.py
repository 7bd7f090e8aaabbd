"""Plot of a run's losses and learning rate, from its metrics file."""

import logging
import math
from typing import Any

import jax

from memjax.buckets.bucket import as_path
from memjax.config_io import AnyPath
from memjax.evaluation.drawing import source_of
from memjax.evaluation.plots import training_curves
from memjax.evaluation.provenance import device_name, version
from memjax.training.monitoring.metrics_files import METRICS_FILE, read_lines

CURVES_FILE = "curves.png"
#: Metric of held-out documents.
VALIDATION = "validation_perplexity"
logger = logging.getLogger(__name__)


def draw_curves(run_dir: AnyPath | str) -> AnyPath | None:
    """Draws `curves.png` of a run: losses of training and validation, learning rate.

    Args:
        run_dir: folder of a run, or of one stage.

    Returns:
        The file; None with fewer than two losses, if it cannot be written, and in
        processes other than the first.
    """
    if jax.process_index() != 0:
        return None
    run_dir = as_path(run_dir)
    entries = read_lines(run_dir / METRICS_FILE)
    train = _points(entries, "train", "loss")
    perplexities = _points(entries, "evaluation", VALIDATION)
    if len(train) < 2:
        return None
    path = run_dir / CURVES_FILE
    try:
        training_curves(
            train,
            [(step, math.log(value)) for step, value in perplexities if value > 0],
            _points(entries, "train", "learning_rate"),
            path,
            title=run_dir.name,
            source=source_of({"device": device_name(), **version()._asdict()}),
        )
    except OSError as error:
        # The run is saved: a missing plot is no error.
        logger.warning("%s cannot be written (%s)", path, error.strerror)
        return None
    return path


def _points(
    entries: list[dict[str, Any]], kind: str, name: str
) -> list[tuple[int, float]]:
    """Steps and finite values of one kind of record."""
    return [
        (entry["step"], value)
        for entry in entries
        if entry["kind"] == kind
        and isinstance(value := entry["values"].get(name), float | int)
    ]
