"""What a committed result says of where it came from."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def provenance(question: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The question, command, settings, device, versions and date of a result."""
    packages = ("jax", "jaxlib", "numpy", "scipy")
    return {
        "question": question,
        "command": shlex.join(["python", *sys.argv]),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "library default"),
        "config": dict(config),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "load_average_1min": os.getloadavg()[0],
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def device_name() -> str:
    """JAX's accelerator where one is in use, or the processor and its cores."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.devices()[0].platform != "cpu":
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores"
