"""What tests of TPU kernels share: interpreting, and compiling without a TPU."""

import importlib.util

import pytest
from jax.experimental.pallas import tpu as pltpu

LIBTPU = importlib.util.find_spec("libtpu") is not None

#: What a kernel has not written is NaN, and so is what lies beyond the last head.
INTERPRETER = pltpu.InterpretParams(
    uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)


def needs_libtpu(test):
    """Marks a test that compiles for a TPU, which takes seconds."""
    reason = "compiling for a TPU takes libtpu (pip install memjax[tpu])"
    test = pytest.mark.slow(pytest.mark.usefixtures("uncached")(test))
    return pytest.mark.skipif(not LIBTPU, reason=reason)(test)
