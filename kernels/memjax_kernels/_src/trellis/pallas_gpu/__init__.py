"""Trellis on a Hopper GPU: kernels in Mosaic, described in `entry`."""

from memjax_kernels._src.trellis.pallas_gpu.entry import trellis_gpu as trellis_gpu
