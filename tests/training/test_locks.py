"""One process trains in a run folder; a claim outlives no process."""

import errno
import fcntl
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memjax.training.locks import disk_lock, lock
from memjax.training.locks.lock import FolderLock, LockedError
from tests.training import processes, toy_run

RUNNING = {"steps": 400, "save_every": 5, "log_every": 1, "sleep": 0.02}


@pytest.mark.slow
def test_a_second_process_is_refused_before_it_writes_anything(tmp_path: Path) -> None:
    first = processes.toy(tmp_path, RUNNING)
    first.read_until("step 12/")

    def content():
        return {
            path.relative_to(tmp_path)
            for path in tmp_path.glob("*")
            # The first process is still writing.
            if path.is_file() and path.suffix != ".tmp"
        }

    before, metrics = content(), (tmp_path / "metrics.jsonl").stat().st_ino
    message = f"in use: process {first.pid} on {socket.gethostname()} trains there"
    with pytest.raises(LockedError, match=message):
        toy_run.main(tmp_path, RUNNING)
    assert content() == before
    assert (tmp_path / "metrics.jsonl").stat().st_ino == metrics
    # However it ends, the folder is free then.
    first.signal(signal.SIGKILL)
    first.finish()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == first.pid
    assert toy_run.main(tmp_path, RUNNING | {"steps": 40, "sleep": 0}) == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 41))
    assert (tmp_path / ".lock").read_bytes() == b""


def leave(folder: Path, **owner: Any) -> None:
    """The claim of a process that may have ended."""
    here = {"host": socket.gethostname(), "pid": 1, "beat": 3}
    (folder / ".lock").write_text(json.dumps(here | owner))


def ended_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_without_file_locks_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    leave(tmp_path)
    with pytest.raises(LockedError, match="process 1 on"):
        FolderLock(tmp_path)
    leave(tmp_path, pid=ended_process())
    FolderLock(tmp_path).close()
    (tmp_path / ".lock").write_text("torn")
    FolderLock(tmp_path).close()


def test_lock_of_another_host_without_heartbeat_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_lock, "WATCH_SECONDS", 0.5)
    leave(tmp_path, host="elsewhere")
    FolderLock(tmp_path).close()
    leave(tmp_path, host="elsewhere")
    beats = iter(range(4, 100))

    def alive(_):
        return leave(tmp_path, host="elsewhere", beat=next(beats))

    monkeypatch.setattr(disk_lock.time, "sleep", alive)
    with pytest.raises(LockedError, match="process 1 on elsewhere"):
        FolderLock(tmp_path)
    leave(tmp_path, host="elsewhere")
    monkeypatch.setattr(
        disk_lock.time, "sleep", lambda _: (tmp_path / ".lock").write_text("")
    )
    FolderLock(tmp_path).close()


def test_running_process_writes_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with FolderLock(tmp_path):

        def beat():
            return json.loads((tmp_path / ".lock").read_text())["beat"]

        while beat() < 3:
            pass
        with pytest.raises(LockedError, match="in use"):
            FolderLock(tmp_path)


@pytest.mark.parametrize("name", ["a[1]", "new[0-9]/run", "back\\slash"])
@pytest.mark.parametrize("given", ["folder", "its parent"])
def test_paths_that_checkpoints_cannot_be_read_from_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    folder = tmp_path / name
    if given == "its parent":
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        folder = Path("run")
    with pytest.raises(ValueError, match=r"run_dir must not hold [\[\\].*read back"):
        toy_run.main(folder, {"steps": 1})
    assert not folder.exists()


@pytest.mark.parametrize("url", ["hdfs2://x", "s3://b/../run"])
@pytest.mark.parametrize("kind", [str, Path])
def test_url_without_bucket_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, kind: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run_dir=.* must be"):
        toy_run.main(kind(url), {"steps": 1})
    assert not list(tmp_path.iterdir())
