"""Runs of several processes: stopped, killed, and gone on with elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training import pod_run
from tests.training.processes import Process, free_port, pod

pytestmark = pytest.mark.slow
Devices = Callable[[int], Mapping[str, str]]


@pytest.fixture(name="texts")
def _texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(12):
        text = " ".join(str(n * i * 7919 % 1000) for i in range(40 + 9 * n))
        (folder / f"{n}.txt").write_text(text)
    return folder


def losses(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [(e["step"], e["values"]["loss"]) for e in lines if e["kind"] == "train"]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def test_stopped_and_killed_runs_resume_on_other_hosts_and_meshes(
    tmp_path: Path, texts: Path, with_devices: Devices
) -> None:
    common = {"texts": str(texts), "loop": {"steps": 48}}

    def alone(name: str, **loop: Any) -> None:
        options = common | {"processes": 1, "loop": {"steps": 48, **loop}}
        assert pod_run.main(tmp_path / name, options) == 0

    def two(devices: int, **mesh: int) -> list[Process]:
        options = common | {"mesh": mesh}
        return pod(pod_run.main, tmp_path / "run", options, 2, with_devices(devices))

    alone("alone", save_every=6, keep=8)
    expected = losses(tmp_path / "alone")
    assert len(expected) == 48 and len(set(expected.values())) == 48

    # What it was after 6 steps.
    shutil.copytree(tmp_path / "alone", tmp_path / "run")
    for later in (tmp_path / "run").glob("checkpoints/[0-9]*"):
        if later.name != "6":
            shutil.rmtree(later)
    # Each host reads rows of its own.
    first = two(2, data=2, fsdp=2)
    seen = first[0].read_until("step 11/")
    assert "resumed at step 6" in seen
    first[1].signal(signal.SIGKILL)
    first[0].signal(signal.SIGKILL)
    for process in first:
        seen += process.finish()[1]
    done = max(map(int, re.findall(r"step (\d+)/", seen)))
    # Both read the same.
    second = two(1, data=1, tensor=2)
    seen = second[0].read_until("step 18/")
    [step] = re.findall(r"resumed at step (\d+)", seen)
    # An interval of 3 steps, and those that were done while a save was written.
    assert done - 6 <= int(step) <= done
    second[1].signal(signal.SIGTERM)
    for process in second:
        process.require_end(75)
    alone("run", save_every=12)
    found = losses(tmp_path / "run")
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)


def test_configurations_that_differ_are_refused_before_anything_is_compiled(
    tmp_path: Path, texts: Path
) -> None:
    common = {"texts": str(texts), "processes": 2, "port": free_port()}
    started = [
        Process(
            pod_run.main,
            tmp_path / "run",
            common | {"process": n, "loop": {"steps": 40 + n}},
        )
        for n in range(2)
    ]
    for process in started:
        output = process.require_end(1)
        said = "processes have different configurations: loop.steps is 40, but 41 on "
        assert said + "process 1" in output
        assert "compiling" not in output
    assert not (tmp_path / "run").exists()


def command(
    run_dir: Path, count: int, *more: str, second: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """`memjax train` on hosts that Slurm names, as processes here.

    `second` is of the environment of the second one.
    """
    words = ["train", "transformer-tiny", "--run-dir", str(run_dir), *more]
    words += ["--data.context-length", "32", "--model.num-layers", "1"]
    words += ["--data.batch-size", "2"]
    # TensorBoard takes a second to import.
    words += ["--loop.save-every", "5", "--loop.log-every", "1", "--loop.writers"]
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "MEMJAX_HEARTBEAT_SECONDS": "5",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "memjax.cli.entry", *words],
            env=os.environ
            | common
            | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}
            | (dict(second or {}) if n == 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(count)
    ]


def test_failed_and_killed_hosts_end_all(tmp_path: Path) -> None:
    # Its tokens can be written nowhere. The first hears of it after a heartbeat's time,
    # in which another run goes on.
    broken = {"XDG_CACHE_HOME": "/proc/nope"}
    failing = command(tmp_path / "failing", 2, "--loop.steps", "9", second=broken)
    _, errors = failing[1].communicate(timeout=100)
    assert failing[1].returncode == 2
    assert errors.splitlines()[-1].startswith("memjax: ") and "/proc/nope" in errors

    run = tmp_path / "run"
    started = command(run, 2, "--loop.steps", "2000")
    # A save of step 5 that is still being written when step 10 is due is waited for.
    while last_step(run) < 11:
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)
    # From the first the others hear of losses.
    started[0].kill()
    require_one_line(started, lost=0)
    require_one_line(failing, lost=1)
    done = last_step(run)
    names = {at.name for at in (run / "checkpoints").iterdir()}
    saved = max(int(name) for name in names if name.isdecimal())
    assert done - 10 <= saved <= done


def last_step(run_dir: Path) -> int:
    """The newest step on record."""
    file = run_dir / "metrics.jsonl"
    steps = re.findall(r'"step": (\d+)', file.read_text()) if file.exists() else []
    return int(steps[-1]) if steps else 0


def require_one_line(started: list[subprocess.Popen[str]], lost: int) -> None:
    """The other process ends with one line of what is wrong."""
    survivor = started[1 - lost]
    _, errors = survivor.communicate(timeout=100)
    started[lost].communicate()
    assert survivor.returncode == 75, errors
    [line] = [line for line in errors.splitlines() if line.startswith("memjax:")]
    assert line == errors.splitlines()[-1]
    assert f"process {lost} has ended or is not reached any more" in line
    assert "Traceback" not in errors and "stack trace" not in errors
