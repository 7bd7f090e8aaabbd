"""Experiments: elastic."""
