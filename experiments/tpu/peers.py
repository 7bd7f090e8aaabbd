"""Cycles of other libraries' kernels for the delta rules, counted beside ours.

    python -m experiments.tpu.peers --python python3.12

The peers need Python 3.12 and another jax: they are installed from PyPI into an
environment of their own, pinned, and all programs are compiled there, ours too. They
take what projections leave, [B, T, H D] in bfloat16 with float32 gates, so that a
peer's transposes count. Serving kernels ("fused") take tokens before the convolution,
and have convolution, SiLU, norms and gates inside; their loop over tiles of tokens is
found at run time. It is counted here for complete tiles.

What this does not show: accuracy, which was not compared, waiting for memory, times.
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lab import results
from experiments.lab.options import Folder, Output, run
from experiments.lab.results import Rows, number
from experiments.tpu import cases_ops, cases_peers, cycles
from memjax.aot.chips import CHIPS
from memjax.aot.cycles.bundles import read_schedule
from memjax.aot.cycles.count import span

PINS = {
    "jax": "0.11.2",
    "libtpu": "0.0.48.1",
    "tokamax": "0.0.17",
    "flywheel-tpu": "0.3.0",
    "deltanet-tpu": "0.3.0",
}
#: Without what it depends on: its kernels need jax alone.
ALONE = {"tpu-inference": "0.32.0"}
OUTPUT, ENVIRONMENT = results.RESULTS / "tpu" / "peers", Path("runs/peers")
#: Of serving kernels: tokens of a tile, and whether an incomplete one has a branch.
TILES = {"flywheel-tpu": (128, True), "tokamax": (128, False), "tpu-inference": (64, 0)}
#: Milliseconds on a v6e, by the README of deltanet-tpu 0.3.0 and by comments in
#: flywheel_tpu/linear_attention/gdn, which name a reshape's part of the kernel's call.
RESHAPE = 0.497
PUBLISHED = {
    "v6e/16/16/deltanet-tpu/float32/forward": 5.63,
    "v6e/16/16/deltanet-tpu/float32/both": 10.93,
    "v6e/16/32/deltanet-tpu/float32/forward": 11.37,
    "v6e/16/32/deltanet-tpu/float32/both": 22.52,
    "v6e/16/16/tpu-inference/fused/forward": 1.306 - RESHAPE,
}


def of_tiles(folder: Path, name: str) -> float:
    """Cycles of a unit of a serving kernel, whose tiles are complete."""
    _, _, heads, peer, *_ = name.split("/")
    tokens, branch = TILES[peer]
    file = max(folder.glob("*_per_seq*[0-9]-final_bundles.txt"))
    schedule = read_schedule(file.read_text())
    loop = schedule.longest
    assert loop is not None, file
    inside = [x.bundles for x in schedule.regions if loop.first < x.first < loop.last]
    return (loop.bundles - branch * max(inside)) / (tokens * int(heads))


def count_all(output: Path) -> None:
    """In the environment: counts what has no result yet."""
    file = Path(f"{output}.json")
    cases = results.read_object(file, "cases")["cases"] if file.exists() else {}
    pins = {name: importlib.metadata.version(name) for name in PINS | ALONE}
    for name in cases_peers.table():
        if name in cases:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            cases[name] = cycles.count_in(folder, cases_peers, name)
            if name.split("/")[3] in TILES and "/fused/" in name:
                cases[name]["of_tiles"] = round(of_tiles(folder, name), 4)
        print(name, cases[name]["cycles"], flush=True)
        question = "cycles of other libraries' kernels"
        results.write_report(output, question, {"pins": pins}, {"cases": cases})


def main(
    python: str = "python3.12",
    environment: Folder = ENVIRONMENT,
    output: Output = OUTPUT,
) -> None:
    """Installs the peers, and counts in their environment what has no result yet.

    Args:
        python: 3.12 or newer.
        environment: folder of the virtual environment.
        output: where .json goes, without the ending.
    """
    here = environment.absolute() / "bin" / "python"
    if sys.executable == str(here):
        count_all(output)
        return
    if not here.exists():
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        for pins, *options in ((PINS, "-e", "."), (ALONE, "--no-deps")):
            pinned = [f"{name}=={version}" for name, version in pins.items()]
            command = [str(here), "-m", "pip", "install", *options, *pinned]
            subprocess.run(command, check=True)
    # jax has named this environment's libtpu there.
    os.environ.pop("TPU_LIBRARY_PATH", None)
    again = [str(here), "-m", "experiments.tpu.peers", *sys.argv[1:]]
    raise SystemExit(subprocess.run(again).returncode)


ROWS = {
    "gates of heads, 16 key and 32 value heads": "v5e/16/32/{}/gdn",
    "the same with convolution, SiLU, norms and gates": "v5e/16/32/{}/fused",
    "gates of channels (KDA), 16 heads": "v5e/16/16/{}/kda",
    "the same, where a head of each chunk forgets much": "v5e/16/16/{}/strong",
}


@results.table("ops/peers", "tpu/peers")
def counted_peers(result: dict[str, Any]) -> Rows:
    """Cycles of every library's kernels, a token and value head."""
    cases, pins = result["cases"], result["config"]["pins"]
    for words, pattern in ROWS.items():
        for peer in ("memjax", "tokamax", "flywheel-tpu", "deltanet-tpu"):
            names = [f"{pattern.format(peer)}/{which}" for which in cases_ops.PASSES]
            passes = [cases[name] for name in names if name in cases]
            # The count has one run of the loop over tiles.
            once = [x["kernels"][1] for x in passes]
            kernels = [x.get("of_tiles", x["kernels"][1]) for x in passes]
            shown = [
                span(*(end - one + kernel for end in x["cycles"]), digits=1)
                for x, one, kernel in zip(passes, once, kernels, strict=True)
            ]
            if passes:
                lacks = "not counted" if peer == "memjax" else "none"
                yield {
                    "cycles a token and value head on a v5e": words,
                    "library": f"{peer} {pins.get(peer, '')}".strip(),
                    "forward": shown[0],
                    "with backward": shown[1] if shown[1:] else lacks,
                    "in kernels": "; ".join(number(x, 1) for x in kernels),
                }
    found = (kernel for case in cases.values() for kernel in case["kernel"])
    loops = {x["name"] for x in found if x["loops_found_at_run_time"]}
    yield f"jax {pins['jax']}, libtpu {pins['libtpu']}"
    yield f"a run finds the loops of {', '.join(sorted(loops))}"


@results.table("ops/calibration", "tpu/peers")
def calibration(result: dict[str, Any]) -> Rows:
    """Counted beside published times."""
    for name, published in PUBLISHED.items():
        case = result["cases"][name]
        _, key_heads, heads, peer, what, which = name.split("/")
        rows = {"": (case["cycles"], published)}
        if "of_tiles" in case:
            reshape = next(x for x in case["dearest"] if "reshape" in x["source"])
            rows = {
                ", the kernel": ([case["of_tiles"]] * 2, published),
                ", XLA's reshape before it": (reshape["cycles"], RESHAPE),
            }
        for part, (ends, measured) in rows.items():
            scale = 1e3 * case["units"] / CHIPS[case["chip"]].clock
            low, high = (end * scale for end in ends)
            yield {
                "on a v6e": f"{peer}, {key_heads}/{heads} heads, {what}, {which}{part}",
                "counted, ms": span(low, high, 2),
                "published, ms": number(measured, 2),
                "counted / published": span(low / measured, high / measured, 2),
            }


if __name__ == "__main__":
    run(main)
