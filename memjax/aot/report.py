"""Report on a compiled step: memory, operations, traffic, cycles, as JSON and a table.

Counted cycles are a range, see `memjax.aot.cycles.count`, without waiting for memory
and for other devices: the speed that follows from the lower end is an upper bound.
"""

import re
from collections.abc import Iterator
from typing import Any

from memjax.aot.chips import Chip, chip_of
from memjax.aot.collectives import KINDS, collectives
from memjax.aot.compile import Compiled, Request, model_flops
from memjax.aot.cycles.count import Count, span
from memjax.training.monitoring.device_peaks import GIB

#: Number of operations and buffers in a report.
NAMED = 10
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)i?B?"
#: Phrases of the compiler for needed and available memory; tests hold them.
_NEEDS = (
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm", re.IGNORECASE),
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)", re.IGNORECASE),
)
_BUFFER = re.compile(rf"Size: {_SIZE}\s(?:.*?Operator: op_name=\"([^\"]*)\")?", re.S)


def report(request: Request, found: Compiled) -> dict[str, Any]:
    """All statistics of a step, as JSON."""
    chip, facts = chip_of(request.topology), found.facts
    compiled = "exhausted" not in facts
    memory = _memory(facts, chip) if compiled else exhausted(facts, chip)
    # Of one device, in the memory of its host.
    memory["host"] = facts["host_arguments"]
    result: dict[str, Any] = {
        "what": request.what,
        "topology": request.topology,
        "slices": request.slices,
        "devices": facts["devices"],
        "mesh": facts["mesh"],
        "tokens": facts["tokens"],
        # The compiler does not refuse every program that is too large.
        "fits": compiled and memory["total"] <= memory["capacity"],
        "memory": memory,
    }
    if not compiled:
        return result
    sent = [row._asdict() for row in collectives(found.text)]
    inside = [row["bytes"] for row in sent if row["kind"] != KINDS[-1]]
    result |= {
        "seconds": facts["seconds"],
        "compiler": {
            # Of XLA's own operations, without kernels.
            "flops": facts["flops"],
            "bytes": facts["bytes_accessed"],
        },
        "collectives": sent,
        "links_seconds": sum(inside) / chip.links,
    }
    if found.counted is not None:
        flops = model_flops(request)
        result["speed"] = _speed(found.counted, facts, chip, flops)
    return result


def _memory(facts: dict[str, Any], chip: Chip) -> dict[str, Any]:
    """Bytes on a device, by the compiler's layout."""
    arguments, given = facts["arguments"], facts["argument_bytes"]
    parts = {
        **arguments,
        # Of incomplete tiles.
        "padding of the arguments": max(0, given - sum(arguments.values())),
        "results beside the arguments": facts["output_bytes"] - facts["alias_bytes"],
        "temporaries": facts["temp_bytes"],
        "program": facts["generated_code_bytes"],
    }
    return {
        "capacity": chip.memory,
        "parts": parts,
        "total": sum(parts.values()),
        "largest": max(parts, key=lambda name: parts[name]),
    }


def exhausted(facts: dict[str, Any], chip: Chip) -> dict[str, Any]:
    """The compiler's statistics on a program that does not fit."""
    message, parts = facts["exhausted"], dict(facts["arguments"])
    needed, available = None, chip.memory
    for pattern in _NEEDS:
        if match := pattern.search(message):
            needed = _bytes(match[1], match[2])
            available = _bytes(match[3], match[4])
            break
    if needed is not None:
        # Of temporaries only, or of all: then those are the rest.
        alone = "HLO temporaries" in message
        rest = needed if alone else needed - sum(parts.values())
        parts["temporaries"] = max(0, rest)
        needed = sum(parts.values())
    buffers = [
        {"bytes": _bytes(size, unit), "operation": name}
        for size, unit, name in _BUFFER.findall(message)
    ]
    return {
        "capacity": available,
        "parts": parts,
        "total": needed,
        "largest": max(parts, key=lambda name: parts[name]),
        "buffers": sorted(buffers, key=lambda row: -row["bytes"])[:NAMED],
        "message": message.splitlines()[0],
    }


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit.upper()])


def _speed(
    counted: Count, facts: dict[str, Any], chip: Chip, flops: float | None
) -> dict[str, Any]:
    """Cycles, and tokens per second without waiting; ranges as their two ends."""
    ends = counted.least, counted.cycles
    seconds = [end / chip.clock for end in ends]
    least = flops / facts["devices"] / chip.flops if flops else None
    dearest = sorted(counted.parts, key=lambda part: -part.cycles)[:NAMED]
    kernels = sum(p.cycles for p in counted.parts if p.operation.kernel)
    return {
        "cycles": ends,
        "cycles_in_kernels": kernels,
        "seconds": seconds,
        "tokens_per_second": [facts["tokens"] / end for end in reversed(seconds)],
        "model_flops": flops,
        "utilisation": least and [least / end for end in reversed(seconds)],
        "dearest": [
            {
                "operation": part.operation.name,
                "source": part.operation.source,
                "cycles": (part.least, part.cycles),
            }
            for part in dearest
        ],
        "loops_of_unknown_length": counted.unknown,
    }


def lines(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows of a table: names and values."""
    memory = result["memory"]
    mesh = ", ".join(f"{n} {axis}" for axis, n in result["mesh"].items() if n > 1)
    yield "devices", f"{result['devices']} ({mesh or 'one copy'})"
    yield "tokens a step", f"{result['tokens']:,}"
    for name, size in memory["parts"].items():
        if size:
            yield f"  {name}", _readable(size)
    total = "unknown" if memory["total"] is None else _readable(memory["total"])
    yield "memory a device", f"{total} of {_readable(memory['capacity'])}"
    if memory["host"]:
        yield "on the host, a device", _readable(memory["host"])
    if not result["fits"]:
        yield "does not fit", f"the largest are {memory['largest']}"
        for buffer in memory.get("buffers", ()):
            yield f"  {_readable(buffer['bytes'])}", buffer["operation"] or "no name"
    if "compiler" not in result:
        return
    parts = ", ".join(f"{name} {x:,.1f} s" for name, x in result["seconds"].items())
    yield "compiling took", parts
    if (flops := result["compiler"]["flops"]) is not None:
        yield "operations a device", f"{flops:,.0f}, without kernels"
    for row in result["collectives"]:
        size = f"{row['bytes'] / 1e6:,.1f} MB in {row['runs']:,}"
        yield f"  {row['kind']}", f"{size}, the largest {row['largest'] / 1e6:,.1f} MB"
    yield "all these on the links, at least", f"{result['links_seconds']:.3g} s"
    if speed := result.get("speed"):
        cycles, seconds = span(*speed["cycles"]), span(*speed["seconds"], digits=3)
        yield "counted cycles", f"{cycles}: {seconds} s"
        for row in speed["dearest"]:
            source = row["source"] or "no name"
            yield f"  {row['operation']}", f"{span(*row['cycles'])}, {source}"
        yield "tokens a second, at most", span(*speed["tokens_per_second"])
        if speed["utilisation"] is not None:
            share = span(*(100 * end for end in speed["utilisation"]), digits=1)
            yield "of the matrix units' peak", f"{share}%"
        if unknown := speed["loops_of_unknown_length"]:
            yield "loops whose length a run finds, counted once", ", ".join(unknown)


def _readable(size: int | float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1024:,.1f} KiB"
