"""Experiments: mplus."""
