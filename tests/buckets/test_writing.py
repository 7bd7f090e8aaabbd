"""What is written to folders that somebody else has filled leads nowhere else."""

import ast
import os
import socket
from pathlib import Path

import jax.numpy as jnp
import pytest

from memjax.buckets.writing import replaced
from memjax.conversation.memory_folder import MemoryFolder
from memjax.models.checkpoints.memory_state import RECORD
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.locks.lock import LOCK_FILE, FolderLock
from memjax.training.monitoring.metrics_files import METRICS_FILE, Appender, read_lines
from tests.test_architecture import TREES

#: Functions that open files to write, by the reason why they may do without
#: `memjax.buckets.writing`.
ALLOWED = {
    "own temporary folder": {
        "memjax.aot.compile.compiled",
        "memjax.aot.compile._facts",
        "memjax.aot.compile.main",
        "memjax.models.checkpoints.memory_state._write_tensors",
        "memjax.models.checkpoints.memory_state.write_memory",
        "memjax.models.checkpoints.hf.peft.save_adapter",
        "memjax.models.checkpoints.hf.safetensors_write.write_folder",
        "memjax.models.checkpoints.hf.safetensors_write._name_shards",
        "memjax.models.checkpoints.hf.safetensors_write._write_tensors.flush",
    },
    "this repository": {"memjax.cli.describe"},
    "a new random name": {"memjax.buckets.writing.replaced"},
    "the null device": {
        "memjax.leaving.flushed",
        "memjax.status._discard",
    },
}


def fill(kind: str, place: Path, target: Path) -> None:
    if kind == "link":
        place.symlink_to(target)
    elif kind == "hard link":
        place.hardlink_to(target)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as found:
            found.bind(str(place))


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "device", "socket"])
def test_a_planted_name_is_not_written_through(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A socket's name is short.
    monkeypatch.chdir(tmp_path)
    precious = Path("precious")
    precious.write_text("key")
    for name in (LOCK_FILE, METRICS_FILE, "whole"):
        fill(kind, Path(name), precious.absolute())
    with pytest.raises(ValueError, match="must be a regular file"):
        FolderLock(Path())
    with pytest.raises(ValueError, match="must be a regular file"):
        Appender(Path(METRICS_FILE))
    if "link" not in kind:
        with pytest.raises(ValueError, match="not a regular file"):
            read_lines(Path(METRICS_FILE))
    with replaced(Path("whole")) as stream:
        stream.write(b"new")
    assert Path("whole").read_text() == "new" and not Path("whole").is_symlink()
    assert precious.read_text() == "key"


def test_the_lock_of_checkpoints_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("key")
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / ".lock").symlink_to(precious)
    with (
        Checkpoints(tmp_path / "steps") as checkpoints,
        pytest.raises(ValueError, match="must be a regular file"),
    ):
        checkpoints.save(1, {"a": jnp.zeros(2)}, {})
    assert precious.read_text() == "key"


def test_a_memory_s_folder_keeps_what_memjax_has_not_written(tmp_path: Path) -> None:
    old = tmp_path / "saved-000001"
    old.mkdir()
    for name in (RECORD, "thesis"):
        (old / name).touch()
    with MemoryFolder(tmp_path) as folder:
        folder.save(lambda path: path.mkdir())
    assert [path.name for path in old.iterdir()] == ["thesis"]


def is_writing(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    text = ast.unparse(call)
    if name in ("write_text", "write_bytes", "savefig", "save_file"):
        return True
    modes = [
        a.value
        for a in (*call.args, *(k.value for k in call.keywords))
        if isinstance(a, ast.Constant) and isinstance(a.value, str)
    ]
    plain = name == "open" and any(set("wax+") & set(m) and len(m) < 4 for m in modes)
    return plain or (name == "open" and ("O_CREAT" in text or "O_WR" in text))


def functions_that_write() -> set[str]:
    found = set()

    def walk(node: ast.AST, where: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and is_writing(child):
                found.add(where)
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            walk(child, f"{where}.{child.name}" if named else where)

    for module, tree in TREES.items():
        if module.startswith("memjax."):
            walk(tree, module)
    return found


def test_files_are_opened_to_write_in_one_place():
    allowed = set().union(*ALLOWED.values())
    assert functions_that_write() == allowed


def test_a_write_that_fails_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "whole").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: .*whole"):
        with replaced(tmp_path / "whole") as stream:
            stream.write(b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    assert (tmp_path / "whole").read_text() == "before"
