"""Cycles of programs that are compiled for a TPU, counted without one."""
