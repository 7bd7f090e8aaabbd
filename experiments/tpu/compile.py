"""Compilation of a case for a TPU in a child process, and its entry of the result.

libtpu writes the scheduled bundles. No TPU is needed, nor used where there is one.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.lab.measure import tree_bytes
from experiments.tpu.case import Case
from memjax.aot import libtpu
from memjax.aot.chips import CHIPS
from memjax.aot.cycles.bundles import Shares
from memjax.aot.cycles.count import PROGRAM, Count, Part
from memjax_kernels._src.common.packs import tuned

FACTS = "facts.json"
#: Operations that an entry names, the dearest first.
DEAREST = 10


class Facts(NamedTuple):
    """Operations and least bytes of a program, temporary memory, and shares."""

    flops: float
    bytes: float
    temporary_bytes: int
    shares: dict[str, Shares]


Sizes = Mapping[str, Mapping[str, Any]]
"""Other sizes of the kernels' programs, by row of `tuned`."""


def compile_case(module: str, name: str, folder: Path, sizes: Sizes) -> Facts:
    """Compiles a case of a module's table into an empty folder, in a child process."""
    arguments = [module, name, str(folder), json.dumps(sizes)]
    done = libtpu.run(__spec__.name, arguments, bundles=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} does not compile: {last[:500]}")
    facts = Facts(**json.loads((folder / FACTS).read_text()))
    shares = {name: Shares(*found) for name, found in facts.shares.items()}
    return facts._replace(shares=shares)


def compile_here(case: Case, folder: Path) -> None:
    """In the child: compiles, and writes the program and the facts."""
    device = libtpu.devices_of(CHIPS[case.chip].smallest)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    program = case.build()
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    compiled = jitted.lower(*jax.tree.map(place, program.arguments)).compile()
    (folder / PROGRAM).write_text(compiled.as_text() or "")
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    moved = program.bytes
    if moved is None:
        results = jax.eval_shape(program.function, *program.arguments)
        moved = float(tree_bytes((program.arguments, results)))
    facts = Facts(program.flops, moved, temporary, dict(program.shares))
    (folder / FACTS).write_text(json.dumps(facts._asdict()))


def entry(case: Case, counted: Count, facts: Facts) -> dict[str, Any]:
    """Cycles and times of a unit of work, kernels and the dearest operations.

    Ranges are lists of their two ends.
    """
    peaks, units = CHIPS[case.chip], case.units
    kinds: dict[str, list[Part]] = {"kernels": [], "copies": [], "other": []}
    for part in counted.parts:
        does = part.operation
        kind = "kernels" if does.kernel else "copies" if does.moves else "other"
        kinds[kind].append(part)
    seconds = [max(1.0, end) / peaks.clock for end in (counted.least, counted.cycles)]
    memory, product = facts.bytes / peaks.bandwidth, facts.flops / peaks.flops
    limit = max(memory, product)
    return {
        "chip": case.chip,
        "unit": case.unit,
        "units": units,
        "cycles": _ends(counted.parts, units),
        **{kind: _ends(parts, units) for kind, parts in kinds.items()},
        "dearest_branches": round(counted.dearest / units, 4),
        "memory_cycles": round(peaks.clock * memory / units, 4),
        "times_limit": [round(max(end, memory) / limit, 3) for end in seconds],
        "flops": facts.flops,
        # Of the matrix unit's peak, if the core never waited for memory.
        "flop_utilisation": [round(product / end, 4) for end in reversed(seconds)],
        "bytes": facts.bytes,
        "temporary_bytes": facts.temporary_bytes,
        "kernel": [
            {
                "name": kernel.name,
                "cycles": kernel.cycles,
                "bundles": kernel.bundles,
                "steps": kernel.steps,
                "loops_found_at_run_time": kernel.unknown,
                "bundles_in_branches": kernel.regions,
                "spills": kernel.use.spills,
                "fills": kernel.use.fills,
                "use": kernel.use.units,
            }
            for kernel in counted.kernels
        ],
        "dearest": _dearest(case, counted.parts),
        "uncounted": list(counted.uncounted),
        "unknown_loops": list(counted.unknown),
    }


def _ends(parts: Iterable[Part], units: float) -> list[float]:
    """The ends of the range of a unit of work."""
    both = ((part.least, part.cycles) for part in parts)
    return [round(sum(end) / units, 4) for end in zip((0, 0), *both, strict=True)]


def _dearest(case: Case, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Operations of one name and source together, the dearest first."""
    found: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        kind = part.operation.name.rstrip("0123456789.").removesuffix(".clone")
        found.setdefault((kind, part.operation.source), []).append(part)
    order = sorted(found.items(), key=lambda item: -_ends(item[1], 1)[1])
    return [
        {
            "operation": kind,
            "source": source,
            "cycles": _ends(same, case.units),
            "runs": sum(part.operation.times for part in same),
            "scheduled": all(part.scheduled for part in same),
        }
        for (kind, source), same in order[:DEAREST]
    ]


if __name__ == "__main__":
    for row, changed in json.loads(sys.argv[4]).items():
        fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
        tuned.SIZES = tuned.changed(row, **fixed)
    table = importlib.import_module(sys.argv[1]).table()
    compile_here(table[sys.argv[2]], Path(sys.argv[3]))
