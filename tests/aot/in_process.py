"""Compiles for TPUs in the test's own process: to start another takes seconds."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from memjax.aot import compile as compile_step
from memjax.aot import libtpu

START = libtpu.run


@pytest.fixture(name="in_process")
def _in_process(monkeypatch, all_platforms, uncached):
    monkeypatch.setattr(libtpu, "run", _run)


def _run(
    module: str, arguments: Sequence[str], bundles: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `libtpu.run`; where libtpu is to write bundles, it has to start with that."""
    if bundles is not None:
        return START(module, arguments, bundles)
    compile_step.main(Path(arguments[0]))
    return subprocess.CompletedProcess([], 0, "", "")
