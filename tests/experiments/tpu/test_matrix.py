"""The matrix of ops and backends names what is there."""

from pathlib import Path

import pytest

import memjax_kernels
from experiments.tpu import matrix
from memjax.aot.chips import CHIPS
from tests.kernels import on_tpu

TESTS = Path(on_tpu.__file__).parent
KERNELS = {op: tests for op, tests in matrix.TPU.items() if tests}


@pytest.mark.parametrize("op", KERNELS)
def test_a_kernel_is_interpreted_and_compiled_where_the_matrix_says(op):
    file, chips = KERNELS[op]
    text = (TESTS / f"{file}.py").read_text()
    module = "layouts_tpu" if op == "heads_first" else op
    assert module in text and "interpret" in text.lower() and "@needs_libtpu" in text
    assert {*chips.split()} <= {*CHIPS}
    of = f"({op}, " if file == matrix.RECURRENCES else ""
    assert all(f'{of}"{chip}:' in text for chip in chips.split())


def test_all_ops_are_in_the_matrix():
    states = {x.removesuffix("_step") for x in dir(memjax_kernels) if "_step" in x}
    assert states <= {*matrix.TPU}
