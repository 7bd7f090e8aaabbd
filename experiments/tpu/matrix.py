"""What was done with each op's implementations: the matrix of `kernels/README.md`.

Tests interpret kernels and compile them for the chips named here. What ran on hardware,
what was timed, and other chips that programs were counted for, is in result files.
"""

from typing import Any, NamedTuple

from experiments.lab.results import Rows, table
from memjax_kernels._src.linear import jla

GPU = "H200"
#: The files of `tests/kernels` that interpret a TPU kernel, and chips they compile for.
ALL, RECURRENCES, BLOCK = "v5e v5p v6e", "test_recurrences_tpu", "test_recurrent_block"


class Tests(NamedTuple):
    """Of a kernel, by the name of the file."""

    file: str
    chips: str = ALL


TPU = {
    "linear_attention": Tests(RECURRENCES, "v5p"),
    "ssd": Tests(RECURRENCES, "v5e v6e"),
    "gla": Tests(RECURRENCES, "v5e v5p"),
    "delta_rule": Tests(RECURRENCES, "v5p"),
    "gated_delta_rule": Tests(RECURRENCES, "v5e v6e"),
    "kda": Tests(RECURRENCES, "v5p v6e"),
    "gdn2": None,
    "gated_slots": Tests(RECURRENCES, "v6e"),
    "gated_scan": None,
    "selective_scan": None,
    "ttt_linear": None,
    "trellis": Tests("trellis/test_trellis_tpu"),
    "lattice": Tests("lattice/test_lattice_tpu"),
    "hippo": None,
    "overlap": Tests("test_overlap"),
    "causal_attention": Tests("test_causal_attention"),
    "cached_attention": Tests("test_cached_attention"),
    "sigmoid_scores": Tests("test_sigmoid_scores"),
    "short_convolution": Tests(BLOCK),
    "l2_normalize": Tests(BLOCK),
    "gated_norm": Tests(BLOCK),
    "rotate": Tests("test_heads"),
    "heads_first": Tests("test_heads"),
}
GPU_TESTS = {op: f"{op}/test_{op}_gpu" for op in ("trellis", "lattice")}
#: Names of cases that are not those of their ops.
CASES = {"lattice-dec": "lattice", "attention": "causal_attention"}


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


@table(
    "kernels/matrix",
    "tpu/cycles",
    "gpu/check",
    "gpu/check_second",
    "speed/ops",
    "speed/ops_gpu",
)
def matrix(
    cycles: dict[str, Any],
    check: dict[str, Any],
    second: dict[str, Any],
    cpu: dict[str, Any],
    gpu: dict[str, Any],
) -> Rows:
    """A row an op, a column a backend."""
    on_cpu, on_gpu = (
        {(row["op"], row["implementation"]) for row in timed["shapes"]}
        for timed in (cpu, gpu)
    )
    # The second check has cases anew.
    checks = {x["case"]: x["agrees"] for x in check["cases"] + second["cases"]}
    for op, tests in TPU.items():
        cells = {"op": f"`{op}`", "xla": "ran on a CPU"}
        timed = [
            name
            for name, rows in (("a CPU", on_cpu), (GPU, on_gpu))
            if (op, "xla") in rows
        ]
        if timed:
            cells["xla"] = f"ran and timed on {' and '.join(timed)}"
        if op == "hippo":
            cells["xla"] += " (`scan`, `direct`)"
        if chips := counted(cycles["cases"], op, kernel=False):
            cells["xla"] += f"; compiled for {' '.join(sorted(chips))}"
        if op in ("causal_attention", "heads_first"):
            cells["xla"] = ""
        if tests:
            chips = counted(cycles["cases"], op, kernel=True) | {*tests.chips.split()}
            chips = " ".join(sorted(chips))
            cells["pallas_tpu"] = f"interpreted; compiled for {chips}; never ran"
        if op in GPU_TESTS:
            agree = [agrees for case, agrees in checks.items() if case.startswith(op)]
            share = f"{sum(agree)} of {len(agree)} checks"
            cells["pallas_gpu"] = f"interpreted; ran on {GPU}, {share} agree"
            if (op, "pallas_gpu") in on_gpu:
                cells["pallas_gpu"] += "; timed there"
        if op in jla.KINDS:
            cells["jla"] = "values by its plain ops, kernels by shape; never ran here"
        columns = ("op", "xla", "pallas_tpu", "pallas_gpu", "jla")
        yield {column: cells.get(column, "") for column in columns}
