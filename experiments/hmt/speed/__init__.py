"""Experiments: hmt, speed."""
