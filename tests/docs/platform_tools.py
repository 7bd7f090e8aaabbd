"""Stands in for the tools of a platform in the commands of "On a pod".

What runs a command on all hosts (`gcloud ... ssh`, `xpk`, `srun`) runs it here on one,
which Slurm names, unless it `HAS_RUN`; `tests/training/test_pods.py` has several. Other
tools only write down how they were called. `memjax` is the real program, at a small
size.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cli.sizes import TRANSFORMER

TOOLS = ("gcloud", "xpk", "srun", "sbatch", "scontrol", "git", "pip")
TOOLS += ("xprof", "memjax")
DEVICES = 2
#: Of `memjax train`: instead of a preset's own.
SMALL = """
    --data.context-length 32 --data.batch-size 4 --data.validation-texts 1
    --loop.steps 2 --loop.evaluate-every 0 --loop.save-every 2 --loop.writers
""".split()


def install(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Writes the tools into a folder: the environment of a shell that finds them."""
    folder.mkdir()
    root = Path(__file__).parents[2]
    for name in TOOLS:
        call = f'exec {sys.executable} -m {__spec__.name} {name} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{call}\n")
        (folder / name).chmod(0o755)
    paths = os.pathsep.join([str(root), str(root / "kernels")])
    return {
        **environment,
        "PATH": os.pathsep.join([str(folder), environment["PATH"]]),
        "PYTHONPATH": paths,
        "CALLS": str(folder / "calls"),
    }


def small(arguments: Sequence[str], devices: int = DEVICES) -> list[str]:
    """The arguments of a `memjax` of a pod, for a few devices and a tiny preset."""
    words = list(arguments)
    if words[0] in ("train", "aot"):
        # The one that compiles fastest: models are tested elsewhere.
        words[1] = "transformer-tiny"
    # The smallest topology has four chips, in each of its slices.
    fsdp = 4 if words[0] == "aot" else devices
    for flag, value in {"--mesh.fsdp": str(fsdp), "--topology": "v5e:2x2"}.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    words += [*TRANSFORMER[1:], "--data.tokenizer", "bytes"]
    if words[0] == "aot":
        return [*words, "--no-cycles", "--data.context-length", "128"]
    return words + SMALL


def _value(words: Sequence[str], flag: str) -> str | None:
    """What follows a flag."""
    return words[words.index(flag) + 1] if flag in words else None


def _on_a_host(command: Sequence[str]) -> int:
    """Runs a command on the only host of a job of Slurm: its exit code."""
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={DEVICES}",
    }
    return subprocess.call(command, env=os.environ | job)


def main(tool: str, arguments: Sequence[str]) -> int:
    """What a tool does when it is called: its exit code."""
    with Path(os.environ["CALLS"]).open("a") as calls:
        calls.write(" ".join([tool, *arguments]) + "\n")
    match tool:
        case "gcloud" | "xpk" if command := _value(arguments, "--command"):
            if command == os.environ.get("HAS_RUN"):
                return 0
            return _on_a_host(["bash", "-euc", command])
        case "srun":
            # Its own options come first.
            command = [x for x in arguments if not x.startswith("--kill-on-bad-exit")]
            has_run = " ".join(command) == os.environ.get("HAS_RUN")
            return 0 if has_run else _on_a_host(command)
        case "sbatch":
            return subprocess.call(["bash", *arguments])
        case "git":
            Path(arguments[-1]).mkdir(exist_ok=True)
            return 0
        case "memjax":
            words = small(arguments)
            return subprocess.call([sys.executable, "-m", "memjax.cli.entry", *words])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
