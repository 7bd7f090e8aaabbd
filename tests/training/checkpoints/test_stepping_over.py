"""Checkpoints that cannot be read are stepped over; names are on the disk at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from memjax.training.checkpoints import checkpoint, disk_folder
from memjax.training.checkpoints.checkpoint import (
    CheckpointError,
    Checkpoints,
    DiskFullError,
    SaveError,
)
from memjax.training.checkpoints.checksums import write_digests
from tests.training import toy_run

STATE = {"w": jnp.arange(6.0)}


def save(folder: Path, *steps: int) -> None:
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, STATE, {"position": step})


def newest(folder: Path, accept: Any = None) -> int | None:
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(STATE, accept=accept)
    return found and found.step


def rewrite(content: bytes) -> Any:
    def damage(folder: Path) -> None:
        (folder / "digests.json").write_bytes(content)

    return damage


def make_folder(folder: Path) -> None:
    (folder / "digests.json").unlink()
    (folder / "digests.json").mkdir()


def make_link_loop(folder: Path) -> None:
    (folder / "digests.json").unlink()
    (folder / "digests.json").symlink_to("digests.json")


def make_pipe(name: str) -> Any:
    """A file in whose place is a pipe, which would be waited on for ever."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def forge(name: str, content: bytes) -> Any:
    """A file that says something else, under digests that agree with it."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)
        write_digests(folder)

    return damage


ENTRY = '{"bytes": %s, "sha256": "0"}'
DAMAGES = {
    "a folder": make_folder,
    "a link loop": make_link_loop,
    "deep JSON": rewrite(b"[" * 200_000),
    "a huge size": rewrite(b'{"state/d": %s}' % (ENTRY % "1e999").encode()),
    "digests in a pipe": make_pipe("digests.json"),
    "a pipe": make_pipe("record/metadata"),
    "a zero byte": rewrite(b'{"state/\\u0000": %s}' % (ENTRY % "1").encode()),
    "no manifest": forge("state/manifest.ocdbt", b"nonsense"),
    "no record": forge("record/metadata", b"[1, 2]"),
    "no leaves": forge("record/metadata", b'{"leaves": {"a": 1}, "meta": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_checkpoint_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "2")
    assert newest(tmp_path) == 1
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert str(tmp_path / "2") in said and "left in place" in said
    assert len(said) < 1000
    # Nor does it stand in the way of the next save.
    save(tmp_path, 3)
    assert newest(tmp_path) == 3


def test_checkpoint_without_run_record_is_skipped(tmp_path: Path) -> None:
    options = {"steps": 6, "save_every": 3}
    assert toy_run.main(tmp_path, options) == 0
    file = tmp_path / "checkpoints" / "6" / "record" / "metadata"
    record = json.loads(file.read_text())
    record["meta"]["skipped"] = ["many"]
    forge("record/metadata", json.dumps(record).encode())(file.parent.parent)
    (tmp_path / "final.bin").unlink()
    assert toy_run.main(tmp_path, options) == 0
    assert (tmp_path / "checkpoints" / "6.damaged").is_dir()


def test_reader_skips_a_checkpoint_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problems, read = disk_folder.problems, Checkpoints._read
    with Checkpoints(tmp_path, keep=1) as training:
        training.save(1, STATE, {})
        training.wait()

        def save_next() -> None:
            training.save(training.steps()[-1] + 1, STATE, {})
            training.wait()

        def judged_late(folder: Path) -> list[str]:
            if folder.name == "1":
                save_next()
            return problems(folder)

        def read_late(reader: Checkpoints, step: int, **args: Any) -> Any:
            if step == 2:
                save_next()
            return read(reader, step, **args)

        monkeypatch.setattr(disk_folder, "problems", judged_late)
        monkeypatch.setattr(Checkpoints, "_read", read_late)
        assert newest(tmp_path) == 3
    assert not [r for r in caplog.records if "is damaged" in r.getMessage()]


def test_incomplete_checkpoint_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder named as a pattern, orbax writes no manifest."""
    monkeypatch.setattr(checkpoint, "check_path", lambda _, path: path)
    with pytest.raises(SaveError, match=r"manifest\.ocdbt was not written"):
        save(tmp_path / "a[1]", 1)
    # A temporary folder may be left, which is no checkpoint.
    assert not [x for x in (tmp_path / "a[1]").iterdir() if x.name.isdigit()]


def test_the_name_of_a_checkpoint_is_on_the_disk_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def spy(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints._writer.wait_until_finished()
        monkeypatch.setattr(os, "fsync", spy)
        checkpoints.check()
        checkpoints.check()
        assert synced == [tmp_path]
    synced.clear()
    write_digests(tmp_path / "1")
    inside = {path.relative_to(tmp_path / "1").as_posix() for path in synced}
    assert {"state", "state/d", "record", ".", "state/manifest.ocdbt"} <= inside


def test_metrics_are_on_the_disk_before_a_checkpoint_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, save = os.fsync, Checkpoints.save

    def spy(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def saved(*args: Any, **options: Any) -> None:
        assert str(tmp_path / "metrics.jsonl") in synced
        save(*args, **options)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(Checkpoints, "save", saved)
    assert toy_run.main(tmp_path, {"steps": 2, "log_every": 1}) == 0


def test_damaged_format_file_is_repaired_as_advised(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    marker = tmp_path / "memjax-checkpoints.json"
    for damaged in (b"{", b"[" * 200_000, None):
        if damaged is None:
            marker.unlink()
        else:
            marker.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"write \{.*\} into it") as caught:
            newest(tmp_path)
        said = str(caught.value)
        marker.write_text(said[said.rindex("{") : said.rindex("}") + 1])
        assert newest(tmp_path) == 1


def test_a_disk_too_small_for_one_checkpoint_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(disk_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError, match="10000 free"):
        toy_run.main(tmp_path, {"steps": 2, "log_every": 1})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_all_unreadable_is_an_error_that_lists_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)

    def refuse(meta: Any) -> None:
        raise CheckpointError("it is none of a run")

    with pytest.raises(CheckpointError, match="damaged: 2, 1"):
        newest(tmp_path, refuse)
