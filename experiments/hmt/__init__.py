"""Experiments: hmt."""
