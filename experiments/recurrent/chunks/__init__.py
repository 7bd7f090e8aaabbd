"""Experiments: chunks of Lattice against its recurrence."""
