"""What was done with each op's implementations: the matrix of `kernels/README.md`.

Chips that a TPU kernel was compiled for are those of its tests, which interpret it too,
and of counted programs. What ran on hardware and was timed is in result files.
"""

from pathlib import Path
from typing import Any

from experiments.lab.results import Rows, table
from memjax.aot.chips import CHIPS
from memjax_kernels._src.linear import jla

SOURCES = ("tpu/cycles", "gpu/check", "gpu/check_second", "speed/ops", "speed/ops_gpu")
GPU, TESTS = "H200", Path(__file__).parents[2] / "tests" / "kernels"
RECURRENCES, BLOCK = "test_recurrences_tpu", "test_recurrent_block"
#: Every op, and the file of its TPU kernel's tests.
TPU = {
    "linear_attention": RECURRENCES,
    "ssd": RECURRENCES,
    "gla": RECURRENCES,
    "delta_rule": RECURRENCES,
    "gated_delta_rule": RECURRENCES,
    "convolved_gated_delta_rule": "test_convolved",
    "kda": RECURRENCES,
    "gdn2": RECURRENCES,
    "gated_slots": RECURRENCES,
    "gated_scan": None,
    "selective_scan": None,
    "ttt_linear": "test_ttt_linear_tpu",
    "trellis": "trellis/test_trellis_tpu",
    "lattice": "lattice/test_lattice_tpu",
    "hippo": None,
    "causal_attention": "test_causal_attention",
    "cached_attention": "test_cached_attention",
    "sigmoid_scores": "test_sigmoid_scores",
    "short_convolution": BLOCK,
    "l2_normalize": BLOCK,
    "gated_norm": BLOCK,
    "rotate": "test_heads",
    "heads_first": "test_heads",
}
#: Ops with kernels for a GPU.
GPU_KERNELS = ("trellis", "lattice")
#: Names of cases that are not those of their ops.
CASES = {"lattice-dec": "lattice", "attention": "causal_attention"}


def compiled(op: str, file: str) -> set[str]:
    """Chips that an op's tests compile for."""
    text = (TESTS / f"{file}.py").read_text()
    # The tests of recurrences have a line for each op.
    of = f'("{op}", ' if file == RECURRENCES else ""
    return {chip for chip in CHIPS if f'{of}"{chip}:' in text}


def counted(cases: dict[str, Any], op: str, kernel: bool) -> set[str]:
    """Chips that programs of an op were compiled for, with kernels or without."""
    found = set()
    for name, case in cases.items():
        first = name.split("/")[0]
        kernels = case["kernels"]
        has = (kernels if isinstance(kernels, float) else kernels[1]) > 0
        if CASES.get(first, first) == op and has == kernel:
            found.add(case["chip"])
    return found


@table("kernels/matrix", *SOURCES)
def matrix(*results: dict[str, Any]) -> Rows:
    """A row an op, a column a backend."""
    cycles, check, second, *timings = results
    cpu, gpu = ({(x["op"], x["implementation"]) for x in y["shapes"]} for y in timings)
    # The second check has cases anew; single tokens had a kernel then.
    cases = (x for x in check["cases"] + second["cases"] if " 1 " not in x["case"])
    checks = {x["case"]: x["agrees"] for x in cases}
    for op, file in TPU.items():
        cells = {"op": f"`{op}`", "xla": "ran on a CPU"}
        timed = [on for on, of in (("a CPU", cpu), (GPU, gpu)) if (op, "xla") in of]
        if timed:
            cells["xla"] = f"ran and timed on {' and '.join(timed)}"
        if op == "hippo":
            cells["xla"] += " (`scan`, `direct`)"
        if chips := counted(cycles["cases"], op, kernel=False):
            cells["xla"] += f"; compiled for {' '.join(sorted(chips))}"
        if op in ("causal_attention", "heads_first"):
            cells["xla"] = ""
        if file:
            chips = counted(cycles["cases"], op, kernel=True) | compiled(op, file)
            chips = " ".join(sorted(chips))
            cells["pallas_tpu"] = f"interpreted; compiled for {chips}; never ran"
        if op in GPU_KERNELS:
            agree = [agrees for case, agrees in checks.items() if case.startswith(op)]
            share = f"{sum(agree)} of {len(agree)} checks"
            cells["pallas_gpu"] = f"interpreted; ran on {GPU}, {share} agree"
            if (op, "pallas_gpu") in gpu:
                cells["pallas_gpu"] += "; timed there"
        if op in jla.KINDS:
            cells["jla"] = "values by its plain ops, kernels by shape; never ran here"
        columns = ("op", "xla", "pallas_tpu", "pallas_gpu", "jla")
        yield {column: cells.get(column, "") for column in columns}
