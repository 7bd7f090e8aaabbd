"""A crash of the writer at any moment leaves one complete memory."""

import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memjax.conversation.memory_folder import MemoryFolder
from memjax.models.checkpoints.memory_state import (
    RECORD,
    PackedMemory,
    read_note,
    write_memory,
)
from memjax.training.locks.lock import LockedError


def packed(turn: int) -> PackedMemory:
    record: dict[str, Any] = {"format": "memjax memory", "version": 4, "model": {}}
    record |= {"parameters": "", "tokenizer": None}
    record |= {"slots": None, "starts": {}, "note": {"turn": turn}}
    return PackedMemory({"cache": np.full((1, 64), turn, np.float32)}, record)


def save(folder: MemoryFolder, turn: int) -> None:
    folder.save(lambda path: write_memory(path, packed(turn)))


def turn_of(folder: Path) -> int:
    found = MemoryFolder(folder).load(read_note)
    assert found is not None
    return found["turn"]


def killed_at(folder: Path, moment: int) -> bool:
    """Saves turn 2 in a child that is killed at its n-th operation on files."""
    with warnings.catch_warnings():
        # The child computes nothing.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        count = 0

        def hook(event: str, args: Any) -> None:
            nonlocal count
            if event == "os.kill":
                return
            count += event.startswith(("open", "os.", "shutil", "fcntl"))
            if count > moment:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            save(MemoryFolder(folder), 2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_complete_memory(tmp_path):
    found = []
    for moment in range(0, 200, 2):
        folder = tmp_path / str(moment)
        with MemoryFolder(folder) as memory:
            save(memory, 1)
        died = killed_at(folder, moment)
        found.append(turn_of(folder))
        if not died:
            break
        # The next save goes on from there, and clears what is left.
        with MemoryFolder(folder) as memory:
            save(memory, 3)
        assert turn_of(folder) == 3
        assert len([p for p in folder.iterdir() if p.name != ".lock"]) == 1
    # From some moment on the new one; the last child came to its end.
    assert found == sorted(found) and set(found) == {1, 2} and 8 < len(found) < 100


def test_second_writer_is_refused_by_name(tmp_path):
    with MemoryFolder(tmp_path / "memory") as memory:
        save(memory, 1)
        program = (
            "import fcntl, sys; f = open(sys.argv[1])\n"
            "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except BlockingIOError: sys.exit(3)"
        )
        lock = str(tmp_path / "memory" / ".lock")
        assert subprocess.run([sys.executable, "-c", program, lock]).returncode == 3
        message = f"process {os.getpid()} on {socket.gethostname()} writes there"
        with pytest.raises(LockedError, match=message):
            save(MemoryFolder(tmp_path / "memory"), 2)
        # Reading needs no lock.
        assert turn_of(tmp_path / "memory") == 1
    save(MemoryFolder(tmp_path / "memory"), 2)
    assert turn_of(tmp_path / "memory") == 2


def test_folder_with_other_content_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds 'notes.txt' and no memory"):
        MemoryFolder(tmp_path)
    for file in (tmp_path / "notes.txt", Path("/dev/zero")):
        with pytest.raises(ValueError, match="memory must be a folder, got the file"):
            MemoryFolder(file)


def test_reader_continues_with_a_save_that_replaced_its_own(tmp_path):
    memory, seen = MemoryFolder(tmp_path / "memory"), []
    assert memory.load(read_note) is None
    save(memory, 1)

    def read(path: Path) -> int:
        seen.append(path.name)
        if len(seen) == 1:
            save(memory, 2)
        return read_note(path)["turn"]

    assert MemoryFolder(tmp_path / "memory").load(read) == 2
    assert seen == ["saved-000001", "saved-000002"]


@pytest.mark.parametrize("kind", ["pipe", "zero", "cut", "flipped"])
def test_damaged_record_is_refused_in_one_line(tmp_path, kind):
    memory = MemoryFolder(tmp_path / "memory")
    save(memory, 1)
    folder = memory.newest()
    assert folder is not None
    file = folder / RECORD
    content = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "zero":
        file.symlink_to("/dev/zero")
    else:
        cut = kind == "cut"
        file.write_bytes(content[:-9] if cut else content.replace(b": 1\n", b": 7\n"))
    with pytest.raises(ValueError, match=f"{RECORD} is ") as refused:
        memory.load(read_note)
    assert "\n" not in str(refused.value)


def test_failed_save_leaves_the_memory_before(tmp_path, monkeypatch):
    memory = MemoryFolder(tmp_path / "memory")
    save(memory, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(memory, 2)
    monkeypatch.undo()
    assert turn_of(tmp_path / "memory") == 1
    save(memory, 3)
    assert turn_of(tmp_path / "memory") == 3


def test_a_damaged_newest_memory_is_stepped_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        write_memory(tmp_path / f"saved-{number:06}", packed(number))
    newest = tmp_path / "saved-000002" / RECORD
    newest.write_text("[]")
    assert turn_of(tmp_path) == 1
    assert [r.getMessage().count("saved-00000") for r in caplog.records] == [2]
    (tmp_path / "saved-000001" / RECORD).write_text("{}")
    # Of several, the newest one's fault is raised.
    with pytest.raises(ValueError, match="saved-000002"):
        turn_of(tmp_path)
    with MemoryFolder(tmp_path) as folder:
        save(folder, 3)
    assert turn_of(tmp_path) == 3
