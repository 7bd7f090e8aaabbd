"""Compiles a case with libtpu in a process of its own, which keeps the bundles.

No TPU is needed, nor used where there is one.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from experiments.ops.cycles.case import Case, least_bytes
from memjax.aot import libtpu
from memjax.aot.cycles.bundles import Shares
from memjax.aot.cycles.count import PROGRAM

FACTS = "facts.json"


class Facts(NamedTuple):
    """What the compilation says beside the program.

    Attributes:
        flops: of the program, by formula.
        bytes: that the program has to move at least.
        temporary_bytes: memory beside arguments and results.
        shares: of the program.
    """

    flops: float
    bytes: float
    temporary_bytes: int
    shares: dict[str, Shares]


def compile_case(module: str, name: str, folder: Path) -> Facts:
    """Compiles a case of a module's table into a folder, in a child process.

    Args:
        module: its name; the child imports no other.
        name: of the case.
        folder: an empty one.

    Raises:
        ValueError: libtpu is not installed.
        RuntimeError: the case does not compile; with the last line of what the
            compiler says.
    """
    done = libtpu.run(__spec__.name, [module, name, str(folder)], bundles=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} does not compile: {last[:500]}")
    facts = Facts(**json.loads((folder / FACTS).read_text()))
    shares = {name: Shares(*found) for name, found in facts.shares.items()}
    return facts._replace(shares=shares)


def compile_here(case: Case, folder: Path) -> None:
    """In the child: compiles, and writes the program and the facts."""
    import jax
    from jax.sharding import SingleDeviceSharding

    device = libtpu.devices_of(case.peaks.smallest)[0]
    sharding = SingleDeviceSharding(device)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    program = case.build()
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    compiled = jitted.lower(*jax.tree.map(place, program.arguments)).compile()
    (folder / PROGRAM).write_text(compiled.as_text() or "")
    analysis = compiled.memory_analysis()
    temporary = getattr(analysis, "temp_size_in_bytes", 0)
    facts = Facts(program.flops, least_bytes(program), temporary, dict(program.shares))
    (folder / FACTS).write_text(json.dumps(facts._asdict()))


if __name__ == "__main__":
    table = importlib.import_module(sys.argv[1]).table()
    compile_here(table[sys.argv[2]], Path(sys.argv[3]))
