"""Saves on a full disk."""

import types
from pathlib import Path
from typing import Any

import pytest

from memjax.training import loop
from memjax.training.checkpoints import disk_folder
from tests.training import toy_run as toy
from tests.training.processes import toy as start


@pytest.mark.parametrize("save_every", [5, 100])
def test_a_save_waits_for_room_on_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    save_every: int,
) -> None:
    # At the start there is room, and at the third try of the first save.
    free = [10**9, 0, 0]
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.01)

    def usage(_: Path) -> Any:
        return types.SimpleNamespace(free=free.pop(0) if free else 10**9)

    monkeypatch.setattr(disk_folder.shutil, "disk_usage", usage)
    assert toy.main(tmp_path, {"steps": 8, "save_every": save_every}) == 0
    assert capsys.readouterr().err.count("trying again for 10 minutes") == 1
    assert (tmp_path / "checkpoints" / "8").is_dir()


@pytest.mark.slow
def test_a_disk_that_stays_full_stops_the_run(small_disk: Path) -> None:
    # 8 MiB hold two checkpoints of this size, and not three.
    options = {"size": 512, "steps": 1000, "log_every": 1000, "save_every": 10}
    process = start(small_disk / "run", options | {"room_seconds": 1})
    output = process.require_end(1)
    assert "DiskFullError" in output.splitlines()[-1]
    assert "no room for a checkpoint in" in output.splitlines()[-1]
    steps = sorted(int(p.name) for p in small_disk.glob("run/checkpoints/[0-9]*"))
    assert steps and steps[0] == 10
    # With fewer to keep there is room, and the same command goes on.
    last = steps[-1]
    start(small_disk / "run", options | {"steps": last + 50, "keep": 1}).require_end()
    left = [p.name for p in small_disk.glob("run/checkpoints/[0-9]*")]
    assert left == [str(last + 50)]
