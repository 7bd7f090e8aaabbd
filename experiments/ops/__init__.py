"""Experiments: the ops, timed and checked."""
