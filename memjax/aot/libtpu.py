"""Compiles for TPUs with libtpu on a machine that has none, each time in a new process.

libtpu reads once, when it starts, where to write what it schedules: one program must
not be mixed with another.
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
    # Else libtpu asks the network for the TPU that it runs on.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # A program that is found compiled has no bundles.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
#: Writes the final bundles of every operation, and what they use, into a folder.
BUNDLES = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=.*final.*"
)


def require_libtpu() -> None:
    """Raises ValueError where libtpu is not installed; no TPU is needed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "compiling for a TPU takes libtpu, and no TPU: pip install libtpu"
        )


def libtpu_version() -> str:
    """The version that is installed."""
    return importlib.metadata.version("libtpu")


def run(
    module: str, arguments: Sequence[str], bundles: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a module that compiles, in a process of its own.

    Args:
        module: its name.
        arguments: of the command line.
        bundles: the folder that gets the bundles; none are written unless given.

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
        slices: how many, >= 1.

    Raises:
        ValueError: libtpu knows no such topology.
    """
    from jax.experimental import topologies

    chip = chip_of(topology)
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        return topologies.get_topology_desc(topology, "tpu", **several).devices
    except Exception as error:
        # Of several types, with what libtpu says of the grid.
        raise ValueError(
            f"topology={short(topology)} is none that libtpu describes, such as "
            f"{chip.smallest}: {short(str(error))}"
        ) from error
