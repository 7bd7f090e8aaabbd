"""Every command of "On a pod" runs; `platform_tools.py` replaces the platform's."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.aot.in_process import _in_process as _in_process
from tests.buckets import stores
from tests.cli import commands
from tests.docs import platform_tools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "memjax" / "training" / "README.md").read_text()
SECTION = PAGE.split("\n## On a pod\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
TRAINED = re.compile(r'--command "(memjax train .*?)"')


#: Blocks that do not run whole: `memjax aot` without slices, as it is with them, and
#: `memjax train` of TPU VMs once more.
AOT, XPK = 0, 4
SLICES = 3


@pytest.fixture(name="gs", scope="module")
def _gs():
    with stores.google() as store:
        yield store


def run(block, folder, gs, **environment):
    """Runs the commands of a block: what they print, and the calls of tools."""
    tools = platform_tools.install(folder / "tools", os.environ)
    # Places of the text: a folder of this test, and a bucket that its programs find.
    block = block.replace("/shared/", f"{folder}/shared/")
    block = block.replace("gs://BUCKET", gs.url(folder.name))
    tools |= gs.environment | environment
    done = subprocess.run(
        ["bash", "-euc", block], env=tools, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, Path(tools["CALLS"]).read_text().splitlines()


def run_here(command):
    """What `memjax` prints, called in this process: to start another takes seconds."""
    words = shlex.split(command)[1:]
    code, out, err = commands.run(*platform_tools.small(words, devices=1))
    assert code == 0, err
    return "\n".join([out, *err])


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("number", sorted({*range(len(BLOCKS))} - {AOT, XPK}))
def test_commands_run(number, tmp_path, gs, monkeypatch):
    here = re.findall("^memjax .*", BLOCKS[number], re.M)
    block = re.sub("^memjax .*\n", "", BLOCKS[number], flags=re.M)
    # The command of `srun` runs in this process; `test_pods.py` starts several.
    job = "".join(re.findall("^srun --kill-on-bad-exit=1 (.*)", block, re.M))
    job = job.replace("/shared/", f"{tmp_path}/shared/")
    printed, calls = run(block, tmp_path, gs, HAS_RUN=job)
    if job:
        assert f"srun --kill-on-bad-exit=1 {job}" in calls
        here.append(job)
    monkeypatch.chdir(tmp_path)
    printed, calls = printed + "".join(map(run_here, here)), calls + here
    trained = [call for call in calls if call.startswith("memjax train")]
    assert printed.count("finished at step 2, state saved") == len(trained)
    asked = [call for call in calls if call.startswith("memjax aot")]
    assert printed.count("memory a device") == len(asked)


def test_a_step_of_one_slice_is_compiled_as_that_of_two():
    [slices] = re.findall("memjax aot .*", BLOCKS[SLICES])
    [alone] = re.findall("memjax aot .*", BLOCKS[AOT])
    assert alone == slices.replace("--slices 2 --mesh.slices 2 ", "")


@pytest.mark.slow
def test_xpk_runs_the_command_of_tpu_vms(tmp_path, gs):
    [command] = TRAINED.findall(BLOCKS[1])
    has_run = command.replace("gs://BUCKET", gs.url(tmp_path.name))
    _, calls = run(BLOCKS[XPK], tmp_path, gs, HAS_RUN=has_run)
    # The tool alone: `memjax` would have left a call of its own.
    [call] = calls
    assert call.endswith(f"--command {has_run}")


def test_every_tool_is_replaced():
    first = {line.split()[0] for block in BLOCKS for line in block.splitlines()}
    # A script that the text writes, and what the shell itself has.
    known = {*platform_tools.TOOLS, "cat", "#!/bin/bash", "#SBATCH", "if", "END"}
    assert len(BLOCKS) == 7
    assert first <= known
