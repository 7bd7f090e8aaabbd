"""Runs of several processes: stopped, killed, and gone on with elsewhere."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.training import pod_run
from tests.training.processes import Process, free_port, pod, toy_program

pytestmark = pytest.mark.slow
Devices = Callable[[int], Mapping[str, str]]


@pytest.mark.parametrize(
    ("count", "asked", "number"),
    [(2, 0, signal.SIGTERM), (2, 1, signal.SIGHUP)],
)
def test_a_signal_to_any_process_saves_once_on_all(
    tmp_path: Path, count: int, asked: int, number: signal.Signals
) -> None:
    # The service that agrees on a step takes seconds, and longer on a busy machine.
    loop = {"steps": 2000, "save_every": 5000, "log_every": 1, "sleep": 0.05}
    started = pod(toy_program, tmp_path, loop, count)
    started[0].read_until("step 7/")
    started[asked].signal(number)
    ends = [process.finish() for process in started]
    assert [code for code, _ in ends] == [75] * count, ends
    [step] = re.findall(r"preempted at step (\d+), state saved", ends[0][1])
    assert [p.name for p in tmp_path.glob("checkpoints/[0-9]*")] == [step]
    assert (tmp_path / "checkpoints" / step / "digests.json").exists()


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


def test_killed_runs_resume_on_other_hosts_and_meshes(
    tmp_path: Path, texts: Path, with_devices: Devices
) -> None:
    def started(name: str, processes: int, devices: int, **mesh: int) -> list[Process]:
        options = {"texts": str(texts), "mesh": mesh}
        environment = with_devices(devices)
        return pod(pod_run.main, tmp_path / name, options, processes, environment)

    [alone] = started("alone", 1, 1)
    alone.require_end()
    expected = losses(tmp_path / "alone")
    assert len(expected) == 40 and len(set(expected.values())) == 40

    first = started("run", 2, 2, data=2, fsdp=2)
    seen = first[0].read_until("step 11/")
    first[1].signal(signal.SIGKILL)
    first[0].signal(signal.SIGKILL)
    for process in first:
        seen += process.finish()[1]
    done = max(map(int, re.findall(r"step (\d+)/", seen)))
    # Others in number, and in what their devices share.
    second = started("run", 4, 1, data=1, fsdp=2, tensor=2)
    seen = second[0].read_until("step 20/")
    [step] = re.findall(r"resumed at step (\d+)", seen)
    # An interval of 3 steps, and those that were done while a save was written.
    assert done - 6 <= int(step) <= done
    second[2].signal(signal.SIGTERM)
    for process in second:
        process.require_end(75)
    [last] = started("run", 1, 1)
    assert "resumed at step" in last.require_end()
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
    words += ["--loop.save-every", "5", "--loop.log-every", "1"]
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "MEMJAX_HEARTBEAT_SECONDS": "10",
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


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without saying {text!r}:\n{seen}")


def test_failure_of_one_host_ends_all(tmp_path: Path) -> None:
    # Its tokens can be written nowhere.
    broken = {"XDG_CACHE_HOME": "/proc/nope"}
    first, second = command(tmp_path, 2, "--loop.steps", "9", second=broken)
    _, errors = second.communicate(timeout=100)
    assert second.returncode == 2
    assert errors.splitlines()[-1].startswith("memjax: ") and "/proc/nope" in errors
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 75
    assert "process 1 has ended" in errors.splitlines()[-1]


@pytest.mark.parametrize("victim", [1, 0])
def test_a_lost_host_ends_the_others_with_one_line(tmp_path: Path, victim: int) -> None:
    started = command(tmp_path, 2, "--loop.steps", "2000")
    # A save of step 5 that is still being written when step 10 is due is waited for.
    read_until(started[0], "step 11/")
    started[victim].kill()
    survivor = started[1 - victim]
    output, errors = survivor.communicate(timeout=100)
    assert survivor.returncode == 75, errors
    lines = [line for line in errors.splitlines() if line.startswith("memjax:")]
    [line] = lines
    assert line == errors.splitlines()[-1]
    assert f"process {victim} has ended or is not reached any more" in line
    assert "Traceback" not in errors and "stack trace" not in errors
    started[victim].communicate()
    if victim == 0:
        return
    done = max([11, *map(int, re.findall(r"step (\d+)/", output))])
    first, second = command(tmp_path, 2, "--loop.steps", str(done + 1))
    seen, errors = first.communicate(timeout=200)
    second.communicate(timeout=100)
    assert (first.returncode, second.returncode) == (0, 0), errors
    [step] = re.findall(r"resumed at step (\d+)", seen)
    assert done - 10 <= int(step) <= done


def test_a_signal_to_a_command_on_several_hosts_is_passed_on(tmp_path: Path) -> None:
    started = command(tmp_path, 2, "--loop.steps", "2000")
    read_until(started[0], "step 3/")
    started[1].send_signal(signal.SIGTERM)
    output, _ = started[0].communicate(timeout=100)
    started[1].communicate(timeout=100)
    assert [process.returncode for process in started] == [75, 75]
    assert "preempted at step" in output
