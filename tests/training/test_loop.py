"""Runs that are killed, stopped, damaged and starved end like ones left in peace."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from memjax.training.checkpoints import disk_folder
from memjax.training.checkpoints.checksums import write_digests
from memjax.training.checkpoints.folder import SaveError
from memjax.training.config import LoopConfig, Outcome
from memjax.training.distributed import multihost as agreement
from memjax.training.loop import train
from memjax.training.resume import NonFiniteError, flatten, require_same_config
from tests.training import toy_run as toy
from tests.training.processes import Process, pod, toy_program
from tests.training.processes import toy as start

BASE = {"steps": 40, "save_every": 5, "log_every": 1, "evaluate_every": 20}


#: What differs from one run to its repetition.
TIMED = ("tokens_per_second", "step_seconds", "goodput")


def untimed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if name not in TIMED}


def metrics(run_dir: Path) -> list[tuple[int, str, Any]]:
    """Everything on record but the times."""
    entries = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entry["values"] = untimed(entry["values"])
        entries.append((entry["step"], entry["kind"], entry["values"]))
    return entries


def require_same_end(run_dir: Path, peaceful: Path) -> None:
    assert (run_dir / "final.bin").read_bytes() == (peaceful / "final.bin").read_bytes()
    # An evaluation repeated after a kill stands behind the lines of its step.
    assert sorted(metrics(run_dir), key=str) == sorted(metrics(peaceful), key=str)


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of BASE that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("peaceful")
    assert toy.main(run_dir, BASE) == 0
    return run_dir


@pytest.fixture
def halfway(tmp_path: Path) -> Path:
    """A run of BASE that has done 23 of its 40 steps."""
    run_dir = tmp_path / "run"
    assert toy.main(run_dir, BASE | {"steps": 23}) == 0
    for entry in (run_dir / "metrics.jsonl").read_text().splitlines()[-1:]:
        assert json.loads(entry)["step"] == 23
    trim_last_evaluation(run_dir)
    return run_dir


def trim_last_evaluation(run_dir: Path) -> None:
    """A run of 40 steps would not have evaluated at step 23."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"step": 23, "kind": "evaluation"' in lines[-1]
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))


@pytest.mark.slow
def test_resumed_in_another_process_equals_uninterrupted(
    halfway: Path, peaceful: Path
) -> None:
    output = start(halfway, BASE).require_end()
    assert "resumed at step 23" in output
    require_same_end(halfway, peaceful)
    steps = [step for step, kind, _ in metrics(halfway) if kind == "train"]
    assert steps == list(range(1, 41))
    assert [s for s, kind, _ in metrics(halfway) if kind == "evaluation"] == [20, 40]


def test_a_finished_run_does_nothing_more(peaceful: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(peaceful, run_dir)
    lines = (run_dir / "metrics.jsonl").read_bytes()
    assert toy.main(run_dir, BASE) == 0
    assert (run_dir / "metrics.jsonl").read_bytes() == lines
    require_same_end(run_dir, peaceful)


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """Kills in the first steps, in the middle of saves, and at random moments."""
    options = BASE | {"size": 256, "sleep": 0.02, "steps": 60}
    run_dir, undisturbed = tmp_path / "run", tmp_path / "peaceful"
    assert toy.main(undisturbed, options | {"sleep": 0}) == 0
    luck = random.Random(0)
    for moment in ("first step", "saving", "any"):
        # On a busy machine a save takes as long as many steps.
        slow = {"sleep": 0.1} if moment == "any" else {}
        process = start(run_dir, options | slow)
        if moment == "saving":
            wait_for(lambda: is_saving(run_dir), process)
        elif moment == "any":
            # The run after the last kill is to resume from something.
            wait_for(lambda: saved_steps(run_dir), process)
            time.sleep(luck.random() * 0.5)
        else:
            process.read_until("step ")
        process.signal(signal.SIGKILL)
        code, seen = process.finish()
        assert code == -signal.SIGKILL
        done = max([0, *(int(n) for n in re.findall(r"step (\d+)/", seen))])
        # What a kill costs: the interval, and what was done while a save was written.
        assert done - max([0, *saved_steps(run_dir)]) <= 2 * options["save_every"]
    output = start(run_dir, options | {"sleep": 0}).require_end()
    assert "resumed at step" in output and "damaged" not in output
    require_same_end(run_dir, undisturbed)
    left = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert left == {"50", "55", "60", "memjax-checkpoints.json", ".lock"}


def saved_steps(run_dir: Path) -> list[int]:
    return [int(p.name) for p in run_dir.glob("checkpoints/[0-9]*") if whole(p)]


def is_saving(run_dir: Path) -> bool:
    # A folder may get its final name while it is searched.
    with contextlib.suppress(FileNotFoundError):
        return any(run_dir.glob("checkpoints/*-tmp/**/d"))
    return False


def whole(folder: Path) -> bool:
    return folder.name.isdecimal() and (folder / "digests.json").exists()


def wait_for(condition: Callable[[], Any], process: Process) -> None:
    while not condition():
        assert not process.ended(), "ended too soon"
        time.sleep(0.001)


@pytest.mark.slow
def test_sigterm_saves_and_exits_75(tmp_path: Path, peaceful: Path) -> None:
    process = start(tmp_path, BASE | {"sleep": 0.05})
    process.read_until("step 7/")
    process.signal(signal.SIGTERM)
    output = process.require_end(75)
    [step] = re.findall(r"preempted at step (\d+), state saved", output)
    assert 7 <= int(step) <= 30
    assert whole(tmp_path / "checkpoints" / step)
    assert metrics(tmp_path)[-1][0] == int(step)
    assert f"resumed at step {step}" in start(tmp_path, BASE).require_end()
    require_same_end(tmp_path, peaceful)


@pytest.mark.slow
def test_sigterm_while_the_first_step_compiles(tmp_path: Path) -> None:
    process = start(tmp_path, BASE | {"compile_sleep": 1.0})
    process.read_until("compiling")
    process.signal(signal.SIGTERM)
    assert "preempted at step 1, state saved" in process.require_end(75)
    assert whole(tmp_path / "checkpoints" / "1")


@pytest.mark.slow
def test_interrupted_evaluation_is_repeated(tmp_path: Path, peaceful: Path) -> None:
    process = start(tmp_path, BASE | {"evaluate_sleep": 60.0})
    process.read_until("evaluating")
    sent = time.monotonic()
    process.signal(signal.SIGINT)
    assert "preempted at step 20, state saved" in process.require_end(75)
    assert time.monotonic() - sent < 20
    assert [kind for _, kind, _ in metrics(tmp_path)] == ["train"] * 20
    assert toy.main(tmp_path, BASE) == 0
    require_same_end(tmp_path, peaceful)


def damage_truncate(folder: Path) -> Path:
    path = max(folder.glob("state/**/d/*"), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)
    return path


def damage_flip(folder: Path) -> Path:
    path = max(folder.glob("state/**/d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    return path


def damage_remove(folder: Path) -> Path:
    path = folder / "state" / "manifest.ocdbt"
    path.unlink()
    return path


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove])
def test_damaged_newest_checkpoint_costs_only_time(
    halfway: Path,
    peaceful: Path,
    damage: Callable[[Path], Path],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = halfway / "checkpoints" / "23"
    file = damage(newest)
    assert toy.main(halfway, BASE) == 0
    [error] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert str(newest) in error and str(file.relative_to(newest)) in error
    assert "resumed at step 20" in capsys.readouterr().err
    assert newest.is_dir()
    require_same_end(halfway, peaceful)


def test_non_finite_steps_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BASE | {"nan_steps": [6, 7, 12], "max_nan_steps": 3}
    assert toy.main(tmp_path / "a", options | {"steps": 7}) == 0
    assert toy.main(tmp_path / "a", options) == 0
    output = capsys.readouterr().err
    assert "step 7: loss or gradients not finite, update skipped (2 in a row" in output
    assert (
        "step 12: loss or gradients not finite, update skipped (1 in a row, 3 in"
        in (output)
    )
    rows = [values for _, kind, values in metrics(tmp_path / "a") if kind == "train"]
    assert [row["skipped_steps"] for row in rows] == [0.0] * 5 + [1.0] + [2.0] * 5 + (
        [3.0] * 29
    )
    assert [n + 1 for n, row in enumerate(rows) if row["loss"] is None] == [6, 7, 12]


def test_too_many_non_finite_steps_stop_the_run_even_across_a_resume(
    tmp_path: Path,
) -> None:
    options = BASE | {"nan_steps": [9, 10, 11], "max_nan_steps": 3}
    assert toy.main(tmp_path, options | {"steps": 10}) == 0
    message = r"stopped at step 11: .* 3 steps in a row \(steps 9 to 11\), 3 skipped"
    with pytest.raises(NonFiniteError, match=message):
        toy.main(tmp_path, options)
    # The step before the stop stays the newest; the bad ones are not saved.
    assert (tmp_path / "checkpoints" / "10").is_dir()
    assert not (tmp_path / "checkpoints" / "15").exists()


def test_changed_configuration_is_refused_by_field(halfway: Path) -> None:
    before = (halfway / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"rate was 0\.05 and is now 0\.1"):
        toy.main(halfway, BASE | {"rate": 0.1})
    # Before the shapes of the state are looked at.
    with pytest.raises(ValueError, match=r"model\.size was 16 and is now 32"):
        toy.main(halfway, BASE | {"size": 32})
    assert (halfway / "metrics.jsonl").read_bytes() == before


def test_added_field_gets_its_former_value(tmp_path: Path) -> None:
    def go(steps: int, record: Any, **earlier: Any) -> Outcome:
        return train(
            lambda state, x: toy.train_step(state, x, 0.05, 0.0),
            toy.init(16),
            toy.Data({}),
            LoopConfig(steps=steps),
            tmp_path,
            config_record=record,
            tokens_per_step=1,
            completed=lambda record: earlier | record,
        )[1]

    go(1, {"rate": 0.05})
    now = {"rate": 0.05, "added": 0}
    with pytest.raises(ValueError, match="added was 'absent' and is now 0"):
        go(2, now)
    with pytest.raises(ValueError, match="added was 1 and is now 0"):
        go(2, now, added=1)
    assert go(2, now, added=0).step == 2


def test_fields_are_compared_by_their_whole_name() -> None:
    stored = {"loop": {"steps": 5}, "schedule": {"steps": 5}, "old": 1}
    require_same_config(stored, stored | {"loop": {"steps": 9}}, {"loop.steps"}, "x")
    with pytest.raises(ValueError, match=r"schedule\.steps was 5 and is now 9"):
        require_same_config(
            stored, stored | {"schedule": {"steps": 9}}, {"loop.steps"}, "x"
        )
    with pytest.raises(ValueError, match="new was 'absent'.*old was 1 and.*'absent'"):
        require_same_config({"old": 1}, {"new": 2}, (), "x")


def test_failed_save_stops_the_run_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(5, "the cable was pulled")

    monkeypatch.setattr(disk_folder, "write_digests", fail)
    options = BASE | {"steps": 200, "save_every": 50, "sleep": 0.01}
    with pytest.raises(SaveError, match="saving step 50 .*cable was pulled"):
        toy.main(tmp_path, options)
    assert 50 <= metrics(tmp_path)[-1][0] < 98


@pytest.mark.slow
def test_speed_leaves_evaluation_out(tmp_path: Path) -> None:
    options = {"steps": 5, "log_every": 1, "evaluate_every": 3, "evaluate_sleep": 1.0}
    assert toy.main(tmp_path, options) == 0
    entries = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    trained = [e["values"] for e in entries if e["kind"] == "train"]
    speeds = [v["tokens_per_second"] for v in trained if "tokens_per_second" in v]
    assert min(speeds) > toy.BATCH / 0.9


@pytest.mark.slow
def test_profile_writes_a_trace(tmp_path: Path) -> None:
    assert toy.main(tmp_path, {"steps": 6, "profile": [3, 4]}) == 0
    [trace] = (tmp_path / "profile").glob("**/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [e for plane in planes for line in plane.lines for e in line.events]
    # What a viewer such as xprof tells steps by.
    steps = [dict(e.stats)["step_num"] for e in events if e.name == "train"]
    assert steps == [3, 4]


def test_budget_of_minutes_stops_cleanly_and_goes_on(
    tmp_path: Path, peaceful: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy.main(tmp_path, BASE | {"minutes": 0.004, "sleep": 0.03}) == 0
    [step] = re.findall(
        r"out of time at step (\d+), state saved", capsys.readouterr().err
    )
    assert 0 < int(step) < 40 and whole(tmp_path / "checkpoints" / step)
    assert toy.main(tmp_path, BASE) == 0
    require_same_end(tmp_path, peaceful)


def test_end_of_data_is_an_error_after_saving(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data ended after step 13, before steps = 40"):
        toy.main(tmp_path, BASE | {"batches": 13})
    assert whole(tmp_path / "checkpoints" / "13")


def run_with(step: Callable[..., Any], run_dir: Path) -> tuple[Any, Outcome]:
    return train(
        step,
        toy.init(16),
        toy.Data({}),
        LoopConfig(steps=3),
        run_dir,
        config_record={},
        tokens_per_step=1,
    )


def test_wrong_metrics_and_step_counts_are_named(tmp_path: Path) -> None:
    def lacks(state: Any, x: Any) -> Any:
        return state._replace(step=state.step + 1), {"loss": 1.0}

    def vector(state: Any, x: Any) -> Any:
        return state, {"loss": 1.0, "finite": True, "each": x[0]}

    def stuck(state: Any, x: Any) -> Any:
        return state, {"loss": 1.0, "finite": True}

    with pytest.raises(ValueError, match=r"the metric 'finite', got \['loss'\]"):
        run_with(lacks, tmp_path / "a")
    with pytest.raises(ValueError, match=r"'each' at step 1 must be a scalar.*\(16,\)"):
        run_with(vector, tmp_path / "b")
    with pytest.raises(ValueError, match="after 3 steps the state is at step 0"):
        run_with(stuck, tmp_path / "c")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"save_every": 0}, "save_every must be at least 1, got 0"),
        ({"evaluate_every": -1}, "evaluate_every must be at least 0, got -1"),
        ({"minutes": 0.0}, r"minutes must be > 0, got 0\.0"),
        ({"profile": (5, 4)}, r"1 <= first <= last, got \(5, 4\)"),
    ],
)
def test_bad_settings_are_named(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoopConfig(**({"steps": 1} | fields))


def test_exit_codes() -> None:
    reasons = ("finished", "out of time", "preempted")
    assert [Outcome(reason, 1, 0).exit_code for reason in reasons] == [0, 0, 75]


def test_data_positions_that_differ_between_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = np.zeros(32, np.uint8)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def gather(mine):
        return np.stack([mine, other])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(ValueError, match='same on every process.*"row": 3'):
        agreement.same_everywhere({"row": 3})
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda mine: np.stack([mine, mine])
    )
    assert agreement.same_everywhere({"row": 3}) == {"row": 3}
    with pytest.raises(ValueError, match=r"data\.get_state\(\) must be JSON"):
        agreement.same_everywhere(object())


def test_configurations_that_differ_between_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = {"loop": {"steps": 30}, "seed": 1, "mechanisms": [{"order": 4}]}
    theirs = [mine, mine | {"seed": 2, "mechanisms": [{"order": 4}, {"order": 5}]}]
    texts = [json.dumps(flatten(each), sort_keys=True) for each in (mine, *theirs)]

    def gather(given: np.ndarray) -> np.ndarray:
        """What three processes give."""
        if given.shape == ():
            return np.array([len(text) for text in texts])
        rows = [text.ljust(given.size).encode() for text in texts]
        return np.stack([np.frombuffer(row, np.uint8) for row in rows])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(ValueError) as refused:
        agreement.require_same_configuration(mine)
    assert str(refused.value) == (
        'processes have different configurations: mechanisms.1.order is "absent", but '
        "5 on process 2; seed is 1, but 2 on process 2"
    )
    texts[2] = texts[0]
    agreement.require_same_configuration(mine)


@pytest.mark.slow
def test_two_processes_stop_at_one_step_and_go_on(tmp_path: Path) -> None:
    """SIGTERM reaches only the second; both save the same step.

    It is made unreadable: both step over it, to the checkpoint before.
    """
    run_dir = tmp_path / "run"

    def pair(options: dict[str, Any]) -> list[Process]:
        return pod(toy_program, run_dir, options, 2)

    first, second = pair(BASE | {"sleep": 0.05, "evaluate_every": 0})
    first.read_until("step 7/")
    second.signal(signal.SIGTERM)
    output = first.require_end(75)
    second.require_end(75)
    [step] = re.findall(r"preempted at step (\d+), state saved", output)
    assert 7 <= int(step) < 40
    folders = sorted(run_dir.glob("checkpoints/[0-9]*"), key=lambda p: int(p.name))
    assert folders[-1].name == step and len(folders) > 1
    (folders[-1] / "state" / "manifest.ocdbt").write_bytes(b"nonsense")
    write_digests(folders[-1])
    first, second = pair(BASE | {"evaluate_every": 0})
    output = first.require_end()
    assert f"resumed at step {folders[-2].name}" in output
    assert f"{step} is damaged" in output
    assert not re.search(r"step \d+/", second.require_end())
    assert [s for s, _, _ in metrics(run_dir)] == list(range(1, 41))
