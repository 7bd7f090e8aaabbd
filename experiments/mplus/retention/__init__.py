"""Experiments: mplus, retention."""
