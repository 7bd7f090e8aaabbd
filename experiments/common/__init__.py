"""Experiments: shared by the rooms."""
