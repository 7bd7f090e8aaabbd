"""Compilation for TPUs with libtpu on a machine without one, in a new process each.

libtpu reads the folder for schedules once, when it starts: programs must not share it.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memjax.aot.chips import chip_of
from memjax.checks import short

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Otherwise libtpu queries the network for its TPU.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # A cached program has no bundles.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
#: Writes the final bundles of every operation, and their utilization, into a folder.
BUNDLES = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=.*final.*"
)


def require_libtpu() -> None:
    """Raises ValueError where libtpu is not installed; no TPU is needed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for a TPU needs libtpu, and no TPU: pip install libtpu"
        )


def libtpu_version() -> str:
    """The installed version."""
    return importlib.metadata.version("libtpu")


def run(
    module: str, arguments: Sequence[str], bundles: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a module that compiles, in a process of its own.

    Args:
        module: its name.
        arguments: of the command line.
        bundles: folder for the bundles; None writes none.

    Raises:
        ValueError: libtpu is not installed.
    """
    require_libtpu()
    environment = os.environ | ENVIRONMENT
    if bundles is not None:
        given = environment.get("LIBTPU_INIT_ARGS", "")
        environment["LIBTPU_INIT_ARGS"] = f"{given} {BUNDLES.format(bundles)}".strip()
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def devices_of(topology: str, slices: int = 1) -> Sequence[Any]:
    """The devices of a topology, slice after slice; in a process of `run`.

    Args:
        topology: of one slice, such as "v5e:16x16".
        slices: their number, >= 1.

    Raises:
        ValueError: libtpu knows no such topology.
    """
    from jax.experimental import topologies

    chip = chip_of(topology)
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        return topologies.get_topology_desc(topology, "tpu", **several).devices
    except Exception as error:
        # Of several types, with the message of libtpu.
        raise ValueError(
            f"topology={short(topology)} is none that libtpu describes, such as "
            f"{chip.smallest}: {short(str(error))}"
        ) from error
