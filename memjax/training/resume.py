"""Resuming a run from its newest checkpoint."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from memjax.training.checkpoints.checkpoint import CheckpointError, Checkpoints
from memjax.training.checkpoints.tree_spec import abstract
from memjax.training.config import LoopConfig
from memjax.training.distributed.sharding import MeshConfig


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


#: Fields that may change on resuming: the length of the run, its reports, the devices,
#: over which a checkpoint is resharded, and the learning rate, which `NonFiniteError`
#: advises to lower.
FREE_FIELDS = frozenset(
    {f"{prefix}{name}" for prefix in ("", "loop.") for name in _names(LoopConfig)}
    | {f"mesh.{name}" for name in _names(MeshConfig)}
    | {"optimizer.learning_rate", "optimizer.schedule_steps", "data.sample_epochs"}
)
#: Free fields that affect the result: changes are reported.
REPORTED_FIELDS = ("optimizer.learning_rate",)


class NonFiniteError(FloatingPointError):
    """Loss or gradients were not finite for too many consecutive steps."""


class SkipCount(NamedTuple):
    """Skipped steps: in total, and consecutive ones up to now."""

    total: int = 0
    in_row: int = 0

    def after(self, step: int, *, finite: bool, limit: int) -> "SkipCount":
        """The count after one more step.

        Raises:
            NonFiniteError: `limit` steps in a row were skipped.
        """
        if finite:
            return SkipCount(self.total, 0)
        count = SkipCount(self.total + 1, self.in_row + 1)
        if count.in_row >= limit:
            raise NonFiniteError(
                f"stopped at step {step}: loss or gradients were not finite for "
                f"{count.in_row} steps in a row (steps {step - count.in_row + 1} to "
                f"{step}), {count.total} skipped in all. Look at the data of these "
                "steps, or run again with a lower learning rate: no checkpoint from "
                "before them was dropped, and with the folders of the newest ones "
                "deleted the run goes on from an older one"
            )
        return count


class Start(NamedTuple):
    """State of a run when its loop starts.

    Attributes:
        step: updates done.
        state: after them.
        skipped: the skipped ones of them.
        restored: whether it comes from a checkpoint.
        changes: changed fields that affect the result.
    """

    step: int
    state: PyTree
    skipped: SkipCount
    restored: bool
    changes: list[str]


def resume(
    checkpoints: Checkpoints,
    state: PyTree,
    data: Any,
    config_record: Mapping[str, Any],
    may_change: Collection[str],
    step_of: Callable[[Any], Any],
    completed: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Start:
    """Restores state and data position from the newest checkpoint, if there is one.

    The arrays of `state` are freed before the checkpoint's are read, so that resuming
    needs no more memory than training.

    Raises:
        ValueError: the checkpoint was written under another configuration, or for
            another state.
    """

    changes: list[str] = []

    def accept(meta: dict[str, Any]) -> None:
        _require_complete(meta)
        run = str(checkpoints.directory)
        stored = completed(meta["config"])
        require_same_config(stored, config_record, may_change, run)
        changes.extend(
            line
            for name, line in _differences(stored, config_record)
            if name.endswith(REPORTED_FIELDS)
        )
        changes.extend(schedule_change(stored, config_record))
        # Only now: a refused checkpoint leaves the caller's state intact.
        _delete_arrays(state)

    # Shapes and shardings alone: the arrays themselves may be freed by `accept`.
    found = checkpoints.restore(abstract(state), accept=accept)
    if found is None:
        return Start(int(step_of(state)), state, SkipCount(), False, changes)
    if int(step_of(found.state)) != found.step:
        raise ValueError(
            f"the state of checkpoint {found.step} in {checkpoints.directory} is at "
            f"step {int(step_of(found.state))}"
        )
    data.set_state(found.meta["data"])
    skipped = SkipCount(*found.meta["skipped"])
    return Start(found.step, found.state, skipped, True, changes)


def schedule_change(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """A line if the learning rate falls to another step than before."""
    ends = []
    for record in map(flatten, (stored, given)):
        # Fine-tuning has its stage in a field of its own.
        prefix = "config." if "config.loop.steps" in record else ""
        # Records that are no run's have neither.
        if not {f"{prefix}optimizer.learning_rate", f"{prefix}loop.steps"} <= {*record}:
            return []
        own = record.get(f"{prefix}optimizer.schedule_steps")
        ends.append(own or record[f"{prefix}loop.steps"])
    old, new = ends
    if old == new:
        return []
    return [
        f"the schedule of the learning rate ended at step {old:,} and now ends at "
        f"{new:,}; optimizer.schedule_steps={old} keeps it, with a constant rate behind"
    ]


def _require_complete(meta: dict[str, Any]) -> None:
    """Raises CheckpointError where a checkpoint's record is none of a run."""
    skipped = meta.get("skipped")
    if (
        not isinstance(meta.get("config"), dict)
        or "data" not in meta
        or not isinstance(skipped, list)
        or [type(n) for n in skipped] != [int, int]
    ):
        raise CheckpointError(
            "its record must hold config, data and two counts of skipped steps, got "
            f"{str(meta)[:200]}"
        )


def require_same_config(
    stored: Mapping[str, Any],
    given: Mapping[str, Any],
    may_change: Collection[str],
    where: str,
) -> None:
    """Raises ValueError naming the fields in which two configurations differ.

    Nested fields are named with dots; those in `may_change` are not compared.
    """
    found = _differences(stored, given)
    lines = [line for name, line in found if name not in may_change]
    if lines:
        raise ValueError(
            f"the run in {where} was started with another configuration: "
            f"{'; '.join(lines)}. Use another folder, or the configuration it had"
        )


def _differences(
    stored: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Names and descriptions of the fields that differ."""
    # Through JSON as the stored one went, so that tuples compare equal to lists.
    old, new = flatten(stored), flatten(as_json(given, "config_record"))
    return [
        (n, f"{n} was {old.get(n, 'absent')!r} and is now {new.get(n, 'absent')!r}")
        for n in sorted({*old, *new})
        if n not in old or n not in new or old[n] != new[n]
    ]


def as_json(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The record after a round trip through JSON: tuples become lists, keys strings.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(dict(record)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from error


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names; an empty mapping stays a value."""
    flat = {}
    for name, value in record.items():
        # Lists of records, such as the mechanisms, are compared field by field.
        if isinstance(value, list) and any(isinstance(x, Mapping) for x in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _delete_arrays(state: PyTree) -> None:
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def finite_flag(metrics: Mapping[str, Any], step: int) -> bool:
    """Whether loss and gradients were finite, so that the update was applied.

    Raises:
        ValueError: `metrics` lacks "loss" or "finite", or holds something that is
            not a scalar.
    """
    for name in ("loss", "finite"):
        if name not in metrics:
            raise ValueError(
                f"train_step must return the metric {name!r}, got {sorted(metrics)}"
            )
    for name, value in metrics.items():
        if np.shape(value) != ():
            raise ValueError(
                f"metric {name!r} at step {step} must be a scalar, got shape "
                f"{np.shape(value)}"
            )
    return bool(metrics["finite"])
