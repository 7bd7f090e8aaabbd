"""Implementation of the ops. Public names are in `memjax_kernels`."""
