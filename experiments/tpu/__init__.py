"""Cycles of programs that are compiled for a TPU."""
