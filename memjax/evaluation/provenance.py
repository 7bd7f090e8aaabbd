"""Provenance of a result: command, settings, device, versions and date."""

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: Folder of results, whose changes are no changes of the code.
RESULTS = "experiments/results"


class Version(NamedTuple):
    """Commit of the code.

    Attributes:
        commit: None where the code is not in a git repository, or there is no git.
        clean: whether the files were as committed; None without a commit.
    """

    commit: str | None
    clean: bool | None


def provenance(question: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Question, command, settings, device, versions and date of a result.

    And the commit, and whether the files were as committed: see `Version`.
    """
    packages = ("jax", "jaxlib", "numpy", "scipy")
    return {
        "question": question,
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "library default"),
        "config": dict(config),
        "date": datetime.date.today().isoformat(),
        **version()._asdict(),
        "device": device_name(),
        # Times on a busy machine mean little.
        "load_average_1min": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def _program() -> list[str]:
    """Command line of the program; a module by its name instead of its path."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return sys.argv[:1]
    # A package runs by its own name.
    return ["-m", spec.name.removesuffix(".__main__")]


# Cached: the files may change while a long program runs.
@functools.cache
def version() -> Version:
    """The commit that the code is from, and whether its files were as committed.

    Result files and untracked files other than Python are ignored.
    """
    root = Path(__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return Version(None, None)
    outside = f":(exclude){RESULTS}"
    try:
        commit = _git(root, "describe", "--always").strip()
        changes = _git(root, "status", "--porcelain", "-uall", "--", ".", outside)
    # Without a commit yet, or in a folder that git does not trust.
    except subprocess.CalledProcessError:
        return Version(None, None)
    clean = all(
        line.startswith("??") and not line.endswith(".py")
        for line in changes.splitlines()
    )
    return Version(commit, clean)


def commit_of(result: Mapping[str, Any]) -> str | None:
    """The commit of a result, marked where the files were not as committed."""
    commit = result.get("commit")
    # Early results lack the field.
    return f"{commit} with changes" if result.get("clean") is False else commit


def _git(root: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
    ).stdout


def device_name() -> str:
    """JAX's accelerator where one is in use, or the processor and its cores."""
    # A program that did not import jax used no accelerator.
    jax = sys.modules.get("jax")
    if jax is not None and jax.devices()[0].platform != "cpu":
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores"
