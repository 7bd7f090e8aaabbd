"""Experiments: Elastic Memory."""
