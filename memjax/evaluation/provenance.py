"""Where a result comes from: command, settings, device, versions and date."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def provenance(question: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Question, command, settings, commit, device, versions and date of a result."""
    packages = ("jax", "jaxlib", "numpy", "scipy")
    return {
        "question": question,
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "library default"),
        "config": dict(config),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": device_name(),
        # Times on a busy machine mean little; the reader can see that it was.
        "load_average_1min": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def _program() -> list[str]:
    """How the program was started: a module by its name, whose path says too much."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec is not None else sys.argv[:1]


def commit() -> str | None:
    """The commit that the code is from, "-dirty" behind it where files have changed.

    None where the code is not in a git repository, or there is no git.
    """
    root = Path(__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


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
