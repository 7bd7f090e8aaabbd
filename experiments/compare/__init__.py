"""Experiments: memories beside a window, compared at equal bytes."""
