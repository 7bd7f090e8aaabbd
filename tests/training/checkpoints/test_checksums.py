"""Digests of a folder: what they refuse beside changed files."""

import json
from pathlib import Path

import pytest

from memjax.training.checkpoints.checksums import DIGEST_FILE, problems, write_digests


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A folder with one file, whole, beside a file of the same content."""
    folder = tmp_path / "checkpoint"
    (folder / "state").mkdir(parents=True)
    for path in (folder / "state" / "w", tmp_path / "w"):
        path.write_bytes(b"weights")
    write_digests(folder)
    assert problems(folder) == []
    return folder


@pytest.mark.parametrize("escape", ["../w", "state/../../w", "absolute"])
def test_path_outside_the_folder_is_refused(folder: Path, escape: str) -> None:
    name = str(folder.parent / "w") if escape == "absolute" else escape
    record = json.loads((folder / DIGEST_FILE).read_text())
    # The file is there, and agrees: only where it lies is wrong.
    record[name] = record["state/w"]
    (folder / DIGEST_FILE).write_text(json.dumps(record))
    [wrong] = problems(folder)
    assert repr(name) in wrong and "outside the checkpoint" in wrong


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"state/w": 3}', '{"state/w": {"bytes": "x"}}', "notes"]
)
def test_malformed_digests_are_a_problem(folder: Path, text: str) -> None:
    (folder / DIGEST_FILE).write_text(text)
    [wrong] = problems(folder)
    assert wrong.startswith(DIGEST_FILE)
