"""Tables of `experiments.speed.ops`, on a CPU and on a GPU."""

from typing import Any

from experiments.lab.results import Rows, number, table, times

Found = dict[str, dict[tuple[str, str], dict[str, Any]]]


def _by_pass(result: dict[str, Any]) -> Found:
    """By op, then by implementation and pass: of several kernels the fastest."""
    found: Found = {}
    for row in result["shapes"]:
        name = row["implementation"]
        kind = name if name in ("reference", "xla") else "kernel"
        kind = "fla" if name.startswith("fla.") else kind
        of = found.setdefault(row["op"], {})
        before = of.get((kind, row["pass"]), row)
        of[kind, row["pass"]] = min(row, before, key=lambda row: row["median_s"])
    return found


@table("ops/kernels", "speed/ops")
def ops_cpu(result: dict[str, Any]) -> Rows:
    """The chunked form against the token loop, forward and with backward."""
    for op, of in _by_pass(result).items():
        cells = {"op": op}
        for direction, words in (("forward", "forward"), ("both", "with backward")):
            loop, fast = of.get(("reference", direction)), of["xla", direction]
            cells |= {
                f"loop, {words}: ms": number(1e3 * loop["median_s"], 1) if loop else "",
                f"chunks, {words}: ms": number(1e3 * fast["median_s"], 1),
                f"speedup, {words}": times(
                    loop["median_s"] / fast["median_s"] if loop else None
                ),
            }
        yield cells | {"time over roofline": times(of["xla", "both"]["times_roofline"])}


@table("ops/loops", "speed/ops_loops")
def ops_loops(result: dict[str, Any]) -> Rows:
    """Time of chunks over that of the token loop, by sizes, on a CPU."""
    found: dict[str, dict[tuple[int, int, int], dict[tuple[str, str], float]]] = {}
    for row in result["shapes"]:
        sharing = row["heads"] // (row.get("key_heads") or row["heads"])
        sizes = row["batch"] * row["heads"], row["width"], sharing
        of = found.setdefault(row["op"], {}).setdefault(sizes, {})
        of[row["implementation"], row["pass"]] = row["median_s"]
    for op, by_size in found.items():
        cells = {"chunks / loop": op}
        for direction, words in (("forward", "forward"), ("both", "with backward")):
            for size in sorted(by_size, key=lambda s: (s[0] * s[1] ** 2, s)):
                (count, width, sharing), taken = size, by_size[size]
                memory = f"{count} of {width}: {4 * count * width**2 / 2**20:.2g} MB"
                memory += f", {sharing} a key head" if sharing > 1 else ""
                ratio = taken["xla", direction] / taken["reference", direction]
                cells[f"{words}, {memory}"] = times(ratio)
        yield cells


@table("ops/kernels_gpu", "speed/ops_gpu")
def ops_gpu(result: dict[str, Any]) -> Rows:
    """Milliseconds of XLA, our kernels and flash-linear-attention."""
    for op, of in _by_pass(result).items():
        cells = {"op": op}
        for direction, words in (("forward", "forward"), ("both", "with backward")):
            for kind, name in (("xla", "XLA"), ("kernel", "kernel"), ("fla", "fla")):
                row = of.get((kind, direction))
                ms = number(1e3 * row["median_s"], 2) if row else ""
                cells[f"{words}, {name}: ms"] = ms
        best = min(row["times_roofline"] for (_, d), row in of.items() if d == "both")
        yield cells | {"fastest over roofline": times(best)}
