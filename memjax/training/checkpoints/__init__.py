"""Checkpoints of a run: verified folders of arrays, saved and restored bit-exactly."""
