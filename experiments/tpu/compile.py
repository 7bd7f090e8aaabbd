"""Compilation of a case for a TPU in a child process, and its entry of the result.

libtpu writes the scheduled bundles. No TPU is needed, nor used where there is one.
"""

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.lab.measure import tree_bytes
from experiments.tpu.case import Case
from memjax.aot import libtpu
from memjax.aot.cycles.bundles import Shares
from memjax.aot.cycles.count import PROGRAM, Count, Part

FACTS = "facts.json"
#: Operations that an entry names, the dearest first.
DEAREST = 10


class Facts(NamedTuple):
    """Operations and least bytes of a program, temporary memory, and shares."""

    flops: float
    bytes: float
    temporary_bytes: int
    shares: dict[str, Shares]


def compile_case(module: str, name: str, folder: Path) -> Facts:
    """Compiles a case of a module's table into an empty folder, in a child process."""
    done = libtpu.run(__spec__.name, [module, name, str(folder)], bundles=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{name} does not compile: {last[:500]}")
    facts = Facts(**json.loads((folder / FACTS).read_text()))
    shares = {name: Shares(*found) for name, found in facts.shares.items()}
    return facts._replace(shares=shares)


def compile_here(case: Case, folder: Path) -> None:
    """In the child: compiles, and writes the program and the facts."""
    device = libtpu.devices_of(case.peaks.smallest)[0]
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
    """Cycles and times of a unit of work, kernels and the dearest operations."""
    peaks, parts = case.peaks, counted.parts
    kernels = _sum(part for part in parts if part.operation.kernel)
    copies = _sum(part for part in parts if part.operation.moves)
    seconds = counted.cycles / peaks.clock
    memory, product = facts.bytes / peaks.bandwidth, facts.flops / peaks.flops
    by_unit = {
        "cycles": counted.cycles,
        "kernels": kernels,
        "copies": copies,
        "other": counted.cycles - kernels - copies,
        "dearest_branches": counted.dearest,
        "memory_cycles": peaks.clock * memory,
    }
    return {
        "chip": case.chip,
        "unit": case.unit,
        "units": case.units,
        **{name: round(value / case.units, 4) for name, value in by_unit.items()},
        "times_limit": round(max(seconds, memory) / max(memory, product), 3),
        "flops": facts.flops,
        # Of the matrix unit's peak, if the core never waited for memory.
        "flop_utilisation": round(product / seconds, 4) if seconds else None,
        "bytes": facts.bytes,
        "temporary_bytes": facts.temporary_bytes,
        "kernel": [
            {
                "name": kernel.name,
                "cycles": kernel.cycles,
                "bundles": kernel.bundles,
                "steps": kernel.steps,
                "bundles_in_branches": kernel.regions,
                "spills": kernel.use.spills,
                "fills": kernel.use.fills,
                "use": kernel.use.units,
            }
            for kernel in counted.kernels
        ],
        "dearest": _dearest(case, parts),
        "uncounted": list(counted.uncounted),
        "unknown_loops": counted.unknown,
    }


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.cycles for part in parts)


def _dearest(case: Case, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Operations of one name and source together, the dearest first."""
    found: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        kind = part.operation.name.rstrip("0123456789.").removesuffix(".clone")
        found.setdefault((kind, part.operation.source), []).append(part)
    order = sorted(found.items(), key=lambda item: -_sum(item[1]))
    return [
        {
            "operation": kind,
            "source": source,
            "cycles": round(_sum(same) / case.units, 4),
            "runs": sum(part.operation.times for part in same),
            "scheduled": all(part.scheduled for part in same),
        }
        for (kind, source), same in order[:DEAREST]
    ]


if __name__ == "__main__":
    table = importlib.import_module(sys.argv[1]).table()
    compile_here(table[sys.argv[2]], Path(sys.argv[3]))
