"""Fixtures for kernels: their interpreters, and compilation without a GPU."""

import functools
import importlib.util
import shutil

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability {
    major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES
  }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
"""


class Gpu:
    """Namespace of the fixture `gpu`."""

    @staticmethod
    def interpreter():
        """Parameters of the interpreter, in which unwritten memory is NaN."""
        parameters = getattr(plgpu, "InterpretGPUParams", None)
        if parameters is not None:
            return parameters()
        # Where jax 0.10.2 keeps it.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()

    @staticmethod
    def exported(function, *arguments) -> str:
        """The module of `function` for CUDA."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments
        )
        checks = [
            export.DisabledSafetyCheck.custom_call(name)
            for name in ("mosaic_gpu", "mosaic_gpu_v2")
        ]
        whole = export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=checks
        )
        return whole(*shapes).mlir_module()

    @staticmethod
    def compiled(function, *arguments) -> str | None:
        """The program of `function` for an H100, machine code of kernels included."""
        plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
        if not any(map(importlib.util.find_spec, plugins)) or not shutil.which("ptxas"):
            pytest.skip("compiling for a GPU takes jax's CUDA plugin and ptxas")
        topology = topologies.get_topology_desc(
            "1x1x1", "cuda", target_config=H100, topology="1x1x1"
        )
        place = functools.partial(
            jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0])
        )
        shapes = jax.tree.map(lambda x: place(x.shape, x.dtype), arguments)
        traced = jax.jit(function).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text()

    @staticmethod
    def close(actual, expected, tolerance):
        """Relative root mean squares of the differences of two trees."""
        actual = jax.tree_util.tree_leaves_with_path(actual)
        for (path, a), b in zip(actual, jax.tree.leaves(expected), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            distance = np.sqrt(np.mean((a - b) ** 2) / (np.mean(b**2) + 1e-30))
            assert distance <= tolerance, (jax.tree_util.keystr(path), distance)


@pytest.fixture(name="_traced", autouse=True, scope="module")
def _all_platforms(all_platforms):
    """Ops choose their form by the platform."""


@pytest.fixture(scope="session")
def gpu():
    return Gpu
