"""The command `memjax memory`: saved memories, without their model."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import tyro

from memjax.buckets.writing import atomic_folder
from memjax.checks import printable
from memjax.config_io import from_record
from memjax.conversation import MemoryFolder, Record
from memjax.models.checkpoints.memory_bytes import saved_bytes
from memjax.models.checkpoints.memory_state import RECORD, TENSORS, read_note
from memjax.status import size

#: Entries that are shown, and characters of each.
SHOWN, LONGEST = 6, 400


def memory(
    what: Annotated[Literal["show", "copy", "remove"], tyro.conf.Positional],
    folder: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path | None, tyro.conf.Positional] = None,
) -> int:
    """Shows, copies or removes the memory of a conversation.

    Args:
        what: show its model, tokens and last turns; copy it; or remove it, and nothing
            else in its folder.
        folder: of the memory, as of `memjax tell`.
        destination: of copy: a folder that does not exist.
    """
    if (destination is None) == (what == "copy"):
        given = "none" if destination is None else str(destination)
        raise ValueError(f"destination is for copy alone, which needs it; got {given}")
    saved = MemoryFolder(folder)
    record = saved.load(lambda path: _record(path))
    if record is None:
        raise ValueError(f"folder={str(folder)!r} holds no memory")
    if what == "show":
        _show(saved, record)
    elif what == "copy":
        assert destination is not None
        _copy(saved, destination)
    else:
        _remove(saved)
    return 0


def _record(path: Path) -> Record:
    return from_record(Record, read_note(path), f"{path / RECORD}: note")


def _show(saved: MemoryFolder, record: Record) -> None:
    """Prints the record; control characters could move a terminal's cursor."""
    newest = saved.newest()
    held = sum(p.stat().st_size for p in newest.rglob("*")) if newest else 0
    lines = {
        "model": record.model,
        "origin": record.origin,
        "read": f"{record.tokens:,} tokens, {record.turns} answer"
        + "s" * (record.turns != 1),
        "bytes": size(held),
    }
    kinds = (saved.load(saved_bytes) or {}).items()
    parts = [f"{size(count)} {kind}" for kind, count in kinds if count]
    lines["state"] = ", ".join(parts) or "empty"
    for name, text in lines.items():
        print(f"{name:7} {_escaped(text)}")
    for entry in record.entries[-SHOWN:]:
        print(f"{entry.role}, {entry.tokens:,} tokens: {_escaped(entry.text)}")


def _escaped(text: str) -> str:
    """The text in one line, without control characters, and cut if it is long."""
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")


def _copy(saved: MemoryFolder, destination: Path) -> None:
    target = MemoryFolder(destination)
    if target.path.exists() and any(target.path.iterdir()):
        raise ValueError(f"destination must be a new folder, {destination} has content")
    with target:
        # Another process may write there meanwhile: the whole save is copied at once.
        saved.load(lambda path: target.save(lambda new: _copied(path, new)))
    print(f"copied {saved.path} to {target.path}")


def _copied(path: Path, new: Path) -> None:
    with atomic_folder(new) as folder:
        for name in (RECORD, TENSORS):
            shutil.copyfile(path / name, folder / name, follow_symlinks=False)


def _remove(saved: MemoryFolder) -> None:
    left = saved.remove()
    print(f"removed the memory of {saved.path}")
    if left:
        print(f"the folder stays, it holds {left[0]!r} too")
