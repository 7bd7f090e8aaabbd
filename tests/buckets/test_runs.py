"""Runs with a folder in a bucket: interrupted, refused and resumed."""

import json
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memjax.buckets.bucket import Bucket
from memjax.cli import quiet
from memjax.training import loop
from memjax.training.checkpoints.folder import RetryableError
from memjax.training.locks import bucket_lock, disk_lock, lock
from memjax.training.locks.lock import FolderLock, LockedError
from tests.buckets.faults import WRITES, Fault
from tests.buckets.stores import Store
from tests.training import toy_run
from tests.training.processes import Process, pod, toy_program

LOOP = {"steps": 12, "save_every": 5, "log_every": 1, "evaluate_every": 6}
in_gs, in_s3 = (
    pytest.mark.parametrize("store", [name], indirect=True) for name in ("gs", "s3")
)


def losses(bucket: Bucket) -> dict[int, float]:
    lines = map(json.loads, bucket.read("metrics.jsonl").decode().splitlines())
    return {e["step"]: e["values"]["loss"] for e in lines if e["kind"] == "train"}


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on a disk, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert toy_run.main(folder, LOOP) == 0
    return folder


# A run that is killed in `gs` equals it too.
@pytest.mark.slow
@in_s3
def test_run_in_a_bucket_equals_one_on_a_disk(
    url: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert toy_run.main(Path(url), LOOP) == 0
    # Nothing is left here, and no folder has the URL's name.
    assert not list(tmp_path.iterdir())
    bucket = Bucket(url)
    assert bucket.read("final.bin") == (whole / "final.bin").read_bytes()
    names = {p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()}

    def small(names):
        return {n.split(".tfevents")[0] for n in names if "/" not in n}

    assert small(bucket.entries()) == small(names) - {".lock"}
    assert any("tensorboard/" in name for name in bucket.entries())
    assert len(losses(bucket)) == 12
    assert [n for n in bucket.entries("checkpoints") if n.endswith("12/digests.json")]
    # Done is done.
    assert toy_run.main(Path(url), LOOP) == 0
    assert len(losses(bucket)) == 12


@pytest.mark.slow
# Saves that were cut short are in `test_checkpoints.py`, for both stores.
@in_gs
def test_killed_run_resumes_bit_for_bit(store: Store, url: str, whole: Path) -> None:
    slow = LOOP | {"sleep": 0.1}
    process = Process(toy_program, Path(url), slow, environment=store.environment)
    process.read_until("step 7/")
    process.signal(signal.SIGKILL)
    process.finish()
    assert toy_run.main(Path(url), LOOP) == 0
    bucket = Bucket(url)
    assert bucket.read("final.bin") == (whole / "final.bin").read_bytes()
    assert list(losses(bucket)) == list(range(1, 13))


# Tracebacks are of the libraries that write there alone.
@pytest.mark.slow
@in_gs
def test_bucket_that_refuses_for_a_while_costs_only_time(
    store: Store,
    url: str,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    quiet.hide_reported()
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.05)
    refusal = Fault("403 AccessDenied", WRITES, "checkpoints")
    with monkeypatch.context() as patch, store.failing(refusal):
        patch.setattr(loop, "ROOM_SECONDS", 0.1)
        with pytest.raises(RetryableError, match=f"{url}.*check the credentials"):
            toy_run.main(Path(url), LOOP)
    # The tracebacks of the libraries are not printed.
    said = capfd.readouterr().err
    assert "Traceback" not in said and said.count("trying again") == 1
    with store.failing(refusal._replace(times=3)):
        assert toy_run.main(Path(url), LOOP) == 0
        assert store.proxy.met == 3
    assert Bucket(url).read("final.bin") == (whole / "final.bin").read_bytes()


# A lock is an object that only one can write: `test_buckets.py` has both stores.
@pytest.mark.slow
@in_s3
def test_second_process_is_refused_and_a_signal_saves(store: Store, url: str) -> None:
    slow = LOOP | {"steps": 4000, "sleep": 0.02, "save_every": 10_000}
    first = Process(toy_program, Path(url), slow, environment=store.environment)
    first.read_until("step 12/")
    here = f"process {first.pid} on {socket.gethostname()} trains there"
    with pytest.raises(LockedError, match=re.escape(f"{url} is in use: {here}")):
        toy_run.main(Path(url), slow)
    first.signal(signal.SIGTERM)
    output = first.require_end(75)
    [step] = re.findall(r"preempted at step (\d+), state saved", output)
    bucket = Bucket(url)
    assert f"checkpoints/{step}/digests.json" in bucket.entries()
    assert max(losses(bucket)) == int(step)
    assert ".lock" not in bucket.entries()


@pytest.mark.slow
def test_several_processes_save_in_one_bucket_and_one_resumes(
    gs: Store, whole: Path
) -> None:
    url = gs.url("pod")
    halfway = LOOP | {"steps": 6}
    processes = pod(toy_program, Path(url), halfway, 2, gs.environment)
    ends = [process.finish() for process in processes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert toy_run.main(Path(url), LOOP) == 0
    found = Bucket(url)
    expected = whole / "metrics.jsonl"
    lines = map(json.loads, expected.read_text().splitlines())
    steps = {e["step"]: e["values"]["loss"] for e in lines if e["kind"] == "train"}
    assert losses(found) == pytest.approx(steps, rel=1e-5)


def leave(url: str, **owner: Any) -> None:
    record = {"host": "elsewhere", "pid": 1, "beat": 3} | owner
    Bucket(url).write(".lock", json.dumps(record).encode())


@in_gs
def test_dead_lock_is_taken_over_and_its_holder_notices(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(disk_lock, "WATCH_SECONDS", 0.5)
    monkeypatch.setattr(bucket_lock, "SETTLE_SECONDS", 0.0)
    with FolderLock(Path(url)) as first:
        first.require_held()
        with pytest.raises(LockedError, match=f"{socket.gethostname()} trains there"):
            FolderLock(Path(url))
        # Another host has not seen a sign of this one for long: it shows none.
        monkeypatch.setattr(bucket_lock.BucketLock, "show", lambda *_: None)
        time.sleep(0.2)
        leave(url)
        with pytest.raises(LockedError, match="process 1 on elsewhere"):
            first.require_held()
        with FolderLock(Path(url)):
            first.close()
            assert Bucket(url).read(".lock")
    assert ".lock" not in Bucket(url).entries()


@in_s3
def test_live_lock_of_another_host_is_respected(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = iter(range(4, 100))
    monkeypatch.setattr(disk_lock.time, "sleep", lambda _: leave(url, beat=next(beats)))
    leave(url)
    with pytest.raises(LockedError, match="process 1 on elsewhere trains"):
        FolderLock(Path(url))


@in_gs
def test_of_two_simultaneous_locks_the_last_wins(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_lock, "WATCH_SECONDS", 0.1)
    leave(url)

    def settle(seconds):
        return leave(url, host="faster") if seconds == 2.0 else None

    monkeypatch.setattr(bucket_lock.time, "sleep", settle)
    with pytest.raises(LockedError, match="process 1 on faster"):
        FolderLock(Path(url))


def test_store_that_refuses_is_named_before_training(
    store: Store, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with store.failing(Fault("403 AccessDenied", WRITES)):
        with pytest.raises(OSError, match=re.escape(f"cannot write {url}/.lock: ")):
            toy_run.main(Path(url), LOOP)
    assert "compiling" not in capsys.readouterr().err
