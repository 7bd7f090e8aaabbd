"""The matrix of ops and backends names what is there."""

import json

import pytest

import memjax_kernels
from experiments.lab.results import RESULTS
from experiments.tpu import matrix

KERNELS = {op: file for op, file in matrix.TPU.items() if file}
CYCLES = json.loads((RESULTS / "tpu" / "cycles.json").read_text())["cases"]


@pytest.mark.parametrize("op", KERNELS)
def test_a_kernel_is_interpreted_and_compiled_where_the_matrix_says(op):
    file = KERNELS[op]
    text = (matrix.TESTS / f"{file}.py").read_text()
    module = "layouts_tpu" if op == "heads_first" else op
    assert module in text and "interpret" in text.lower() and "@needs_libtpu" in text
    # By a test of its own, or to count cycles.
    assert matrix.compiled(op, file) | matrix.counted(CYCLES, op, kernel=True)


def test_chips_are_those_of_the_op():
    """One that another op of the same file compiles for is not its own."""
    assert matrix.compiled("kda", matrix.RECURRENCES) == {"v5e", "v6e"}
    assert matrix.compiled("gla", matrix.RECURRENCES) == {"v5p"}


def test_all_ops_are_in_the_matrix():
    states = {x.removesuffix("_step") for x in dir(memjax_kernels) if "_step" in x}
    assert states <= {*matrix.TPU}
