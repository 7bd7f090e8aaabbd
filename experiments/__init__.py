"""Experiments: one question each, run as `python -m experiments.<room>.<name>`."""
