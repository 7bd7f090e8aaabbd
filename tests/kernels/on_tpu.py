"""TPU kernels in tests: interpreted, and compiled without a TPU."""

import functools
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_attention,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels._src import causal_attention
from memjax_kernels._src.heads import layouts_tpu, rotate_tpu

LIBTPU = importlib.util.find_spec("libtpu") is not None

#: What a kernel has not written is NaN, and so is what lies beyond the last head.
INTERPRETER = pltpu.InterpretParams(
    uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)


def interpret_attention(monkeypatch):
    """Runs kernels of attention, and those around them, where there is no TPU."""
    make = functools.partial(splash_attention.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha", make)
    for module in (causal_attention, layouts_tpu, rotate_tpu):
        static = module.Static

        def interpreted(*given, static=static):
            return static(*given)._replace(interpret=True)

        monkeypatch.setattr(module, "Static", interpreted)


def needs_libtpu(test):
    """Marks a test that compiles for a TPU, which takes seconds."""
    reason = "compiling for a TPU takes libtpu (pip install libtpu)"
    test = pytest.mark.slow(pytest.mark.usefixtures("uncached")(test))
    return pytest.mark.skipif(not LIBTPU, reason=reason)(test)


def compiled_for_two(chip, function, arrays, axis="data", specs=None):
    """The program of two devices, which divide the arrays by `specs`.

    None divides the batch of all arrays.
    """
    devices = np.array(topologies.get_topology_desc(chip, "tpu").devices)[:2]
    mesh = Mesh(devices, (axis,))
    specs = [P(axis)] * len(arrays) if specs is None else specs
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        return str(jax.jit(function).lower(*shapes).compile().as_text())
