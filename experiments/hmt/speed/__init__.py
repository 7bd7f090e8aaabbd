"""Experiments: a training step of HMT, timed."""
