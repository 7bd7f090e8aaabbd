"""Experiments: M+ timed, and its cost."""
