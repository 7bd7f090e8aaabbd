"""Runs every model of a comparison with every seed, and keeps what is finished.

Every run keeps its score in the run folder, and the results are written anew after each
run, so that a program that was stopped continues.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.results import settings
from experiments.memories import small_models as comparison
from memjax.config_io import to_record
from memjax.models import ModelConfig
from memjax.training import pretrain as run
from memjax.training.checkpoints.checksums import write_atomically


class Case(NamedTuple):
    """One model of a comparison.

    Attributes:
        name: unique within the comparison.
        model: what is trained.
        fields: what else its rows of the results say, such as the context length.
    """

    name: str
    model: ModelConfig
    fields: dict[str, Any] = {}


def run_all(
    config: comparison.Config,
    cases: Sequence[Case],
    run_of: Callable[[Case, int], run.RunConfig],
    measure: Callable[[Case, run.RunConfig, Path], dict],
    report: Callable[[list[dict]], None] = lambda rows: None,
    seeds: Sequence[int] | None = None,
) -> list[dict]:
    """Runs every case with every seed, the finished ones excepted.

    Args:
        config: names the run folder, the seeds, and the cases if not all are run.
        cases: what is compared.
        run_of: (case, seed) -> the run.
        measure: (case, run, folder) -> numbers of this run.
        report: called with all rows so far after each run that was not finished
            before, and at the end.
        seeds: None is all of the config.

    Raises:
        ValueError: if `config.only` names no case, or the folder holds the score of
            another run under the same name.
    """
    names = list(dict.fromkeys(case.name for case in cases))
    if unknown := set(config.only) - set(names):
        raise ValueError(f"only={sorted(unknown)} must be among {names}")
    # What is trained is in the run; how it is scored is in the fields below.
    fields = settings(config).items()
    scored = ("test_", "validation_")
    shared = {name: value for name, value in fields if name.startswith(scored)}
    rows, reported = [], 0
    for case in cases:
        if config.only and case.name not in config.only:
            continue
        case_name = "-".join([case.name, *map(str, case.fields.values())])
        for seed in config.seeds if seeds is None else seeds:
            chosen = run_of(case, seed)
            identity = {"run": to_record(chosen), "config": shared}
            place = case_name.replace(" ", "_").replace("/", "_")
            folder = config.run_dir / place / f"seed{seed}"
            row = _stored(folder, identity)
            is_new = row is None
            if row is None:
                print(f"{case_name}, seed {seed}", flush=True)
                row = measure(case, chosen, folder) | _sizes(chosen.model)
                score = json.dumps({"identity": identity, "row": row})
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / "score.json", score)
            rows.append({"name": case.name, "seed": seed} | case.fields | row)
            if is_new:
                report(rows)
                reported = len(rows)
    if reported < len(rows):
        report(rows)
    return rows


def _stored(folder: Path, identity: dict) -> dict | None:
    """The row of a finished run, None if there is none yet."""
    file = folder / "score.json"
    if not file.exists():
        return None
    stored = json.loads(file.read_text())
    # As JSON, in which tuples are lists.
    if stored["identity"] != json.loads(json.dumps(identity)):
        raise ValueError(
            f"{folder} holds the score of another run under this name; remove it or "
            "give another --run-dir"
        )
    return stored["row"]


def _sizes(model: ModelConfig) -> dict[str, int]:
    return {
        "parameters": comparison.parameters(model),
        "hidden_dim": model.hidden_dim,
        "state_bytes": comparison.state_bytes(model),
    }
