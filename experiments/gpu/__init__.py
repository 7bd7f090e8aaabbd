"""Checks of kernels on a GPU."""
