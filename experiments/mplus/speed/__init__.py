"""Experiments: mplus, speed."""
