"""Lattice on a Hopper GPU: kernels in Mosaic, described in `entry`."""

from memjax_kernels._src.lattice.pallas_gpu.entry import lattice_gpu as lattice_gpu
from memjax_kernels._src.lattice.pallas_gpu.entry import unsupported as unsupported
