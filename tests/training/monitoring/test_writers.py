"""Services get each step once; none of them can stop a run."""

import importlib.util
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from memjax.config_io import from_record
from memjax.training.config import LoopConfig
from memjax.training.monitoring import writers
from tests.training import toy_run

LOOP = {"steps": 12, "save_every": 4, "log_every": 1}


class FakeWandb(types.ModuleType):
    """Takes the calls that are made of wandb; `rows` are of all its runs."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.started: list[dict[str, Any]] = []
        self.finished = 0
        self.down = False

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def init(self, **given: Any) -> "FakeWandb":
        self.started.append(given)
        self.id = given["id"] or "run-1"
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, float], *, step: int) -> None:
        if self.down:
            raise ConnectionError("no network")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(name="wandb")
def _wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return module


def test_resumed_run_continues_at_the_service_without_repeats(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    options = LOOP | {"writers": ["wandb"], "evaluate_every": 4}
    toy_run.main(tmp_path, options | {"steps": 7})
    # As if it had been killed before the checkpoint of step 7.
    (tmp_path / "checkpoints" / "7" / "digests.json").unlink()
    toy_run.main(tmp_path, options)
    assert [given["id"] for given in wandb.started] == [None, "run-1"]
    assert wandb.started[0]["config"]["model"] == {"size": 16}
    assert wandb.finished == 2
    rows = [row for row, _ in wandb.rows]
    assert rows == list(range(len(rows)))
    steps = [v["step"] for _, v in wandb.rows if "train/loss" in v]
    assert steps == list(range(1, 13))
    tested = [v["step"] for _, v in wandb.rows if "evaluation/weight" in v]
    assert tested == [4, 7, 8, 12]
    # Only what was asked for.
    assert not (tmp_path / "tensorboard").exists()


def test_failing_service_is_reported_once(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.down = True
    with caplog.at_level(logging.WARNING):
        assert toy_run.main(tmp_path, LOOP | {"writers": ["wandb"]}) == 0
    [said] = [r.getMessage() for r in caplog.records if "wandb" in r.getMessage()]
    assert "no network" in said and "metrics.jsonl has all of them" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 12


def test_refusing_service_is_reported_before_the_start(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match="wandb does not take the run: no API key"):
        toy_run.main(tmp_path, LOOP | {"writers": ["wandb"]})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_damaged_record_of_sent_steps_keeps_the_run(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    (tmp_path / "wandb.json").write_text('{"id": "run-1"}')
    with pytest.raises(ValueError, match=r"wandb\.json is damaged"):
        writers.open_writers(["wandb"], tmp_path, 0, {})
    assert not wandb.started


def test_missing_package_error_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"writers=\('mlflow',\) needs the package mlflow: pip install mlflow"
    with pytest.raises(ValueError, match=message):
        toy_run.main(tmp_path / "run", LOOP | {"writers": ["mlflow"]})
    assert not (tmp_path / "run").exists()


def test_missing_writers_are_refused() -> None:
    with pytest.raises(ValueError, match="writers.*wandbe"):
        from_record(LoopConfig, {"steps": 1, "writers": ["wandbe"]}, "config")
    with pytest.raises(ValueError, match="writers names one twice"):
        LoopConfig(steps=1, writers=("wandb", "wandb"))


def add_twice(folder: Path, name: str) -> dict[str, Any]:
    """What a run and its continuation send: steps 1 to 5, then 4 to 8."""
    for first in (1, 4):
        [writer] = writers.open_writers([name], folder, 0, {"a": {"b": 1}, "c": [1]})
        for step in range(first, first + 5):
            writer.add("train", step, {"loss": float(step), "bad": float("nan")})
        writer.close()
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    record = add_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    run = client.get_run(record["id"])
    assert run.data.params == {"a.b": "1", "c": "[1]"}
    assert run.info.status == "FINISHED"
    found = client.get_metric_history(record["id"], "train/loss")
    assert [(m.step, m.value) for m in found] == [(n, float(n)) for n in range(1, 9)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    record = add_twice(tmp_path, "wandb")
    assert record["sent"] == {"train": 8} and record["rows"] == 8
    kept = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in kept] == [f"run-{record['id']}.wandb"] * 2
    assert [path.read_bytes().count(b"train/loss") for path in kept] >= [5, 3]
