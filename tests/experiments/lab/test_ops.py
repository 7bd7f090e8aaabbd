"""Operations and bytes of the ops agree with XLA's count; inputs."""

from typing import Any

import jax
import pytest

from experiments.lab import ops
from experiments.lab.ops import Shape
from memjax_kernels._src.linear.chunks import channel_chunk_size

#: GDN-2 is counted by the branch of KDA.
RECURRENT = [op for op in ops.ARGUMENTS if op not in ("attention", "gdn2")]


def test_bytes_are_those_of_inputs_outputs_and_memories():
    # q, k, v, alpha, y in 2 bytes, stored memories once per chunk, four float32 gates.
    expected = 3 * (2 * (5 * 64 + 2 * 64 * 64 / 32) + 16)
    assert ops.cost("trellis", Shape(1, 3, 1, 64), 32, "bfloat16", False).bytes == (
        expected
    )
    # Tokens and float32 gates, the memory before and after, and gradients of all.
    shape = Shape(1, 64, 2, 32)
    forward, both = (
        ops.cost("gated_delta_rule", shape, 0, "float32", back).bytes
        for back in (False, True)
    )
    inputs, outputs, memory = 4 * 128 * (3 * 32 + 2), 4 * 128 * 32, 4 * 2 * 32 * 32
    assert forward == inputs + outputs + 2 * memory
    assert both == forward + 2 * inputs + outputs + 2 * memory


def counted(function: Any, *arguments: Any) -> float:
    """Operations by XLA's count, element by element as well."""
    analysis: Any = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return analysis["flops"]


@pytest.mark.slow
@pytest.mark.parametrize("op", RECURRENT)
def test_operations_are_those_that_xla_counts(op):
    """In one chunk, where no loop hides work; XLA counts elementwise work as well."""
    by_channel = op in ("gla", "gated_slots", "kda")
    size = 32 if op in ops.CHUNKED else channel_chunk_size() if by_channel else 64
    shape = Shape(1, size, 2, 64)
    arrays = jax.eval_shape(lambda: ops.inputs(op, shape, "float32"))
    given = [arrays[name] for name in ops.ARGUMENTS[op]]
    function = ops.forward(op, "xla", size)
    forward = counted(function, *given)
    both = counted(ops.with_gradients(function), arrays["v"], *given)
    for backward, flops in ((False, forward), (True, both)):
        expected = ops.cost(op, shape, size, "float32", backward).flops
        assert 0.6 < flops / expected < 1.25, (backward, flops / expected)
