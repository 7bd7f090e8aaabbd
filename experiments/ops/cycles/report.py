"""What the result file says of a counted case."""

from collections.abc import Iterable
from typing import Any

from experiments.ops.cycles.case import Case
from experiments.ops.cycles.compile import Facts
from memjax.aot.cycles.count import Count, Kernel, Part

#: Operations that an entry names, the dearest first.
DEAREST = 10


def entry(case: Case, counted: Count, facts: Facts) -> dict[str, Any]:
    """Cycles and times of a unit of work, kernels and the dearest operations."""
    per_unit = lambda value: round(value / case.units, 4)
    peaks = case.peaks
    clock = peaks.clock
    parts = counted.parts
    kernels = _sum(part for part in parts if part.operation.kernel)
    copies = _sum(part for part in parts if part.operation.moves)
    seconds = counted.cycles / clock
    memory, product = facts.bytes / peaks.bandwidth, facts.flops / peaks.flops
    estimates = sum(
        part.cycles
        if part.operation.kernel
        else part.operation.times * (part.operation.estimate or 0.0)
        for part in parts
    )
    return {
        "chip": case.chip,
        "unit": case.unit,
        "units": case.units,
        "cycles": per_unit(counted.cycles),
        "kernels": per_unit(kernels),
        "copies": per_unit(copies),
        "other": per_unit(counted.cycles - kernels - copies),
        "dearest_branches": per_unit(counted.dearest),
        "with_estimates_alone": per_unit(estimates),
        "ns": per_unit(1e9 * seconds),
        "memory_ns": per_unit(1e9 * memory),
        "product_ns": per_unit(1e9 * product),
        "memory_cycles": per_unit(clock * memory),
        "times_limit": round(max(seconds, memory) / max(memory, product), 3),
        "flops": facts.flops,
        # Of the matrix unit's peak, if the core never waited for memory.
        "flop_utilisation": round(product / seconds, 4) if seconds else None,
        "bytes": facts.bytes,
        "temporary_bytes": facts.temporary_bytes,
        "kernel": [_kernel(kernel) for kernel in counted.kernels],
        "dearest": _dearest(case, parts),
        "uncounted": list(counted.uncounted),
        "unknown_loops": counted.unknown,
    }


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.cycles for part in parts)


def _kernel(kernel: Kernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "cycles": kernel.cycles,
        "bundles": kernel.bundles,
        "steps": kernel.steps,
        "bundles_in_branches": kernel.regions,
        "spills": kernel.use.spills,
        "fills": kernel.use.fills,
        "use": kernel.use.units,
    }


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
