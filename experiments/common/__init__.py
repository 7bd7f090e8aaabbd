"""Experiments: common."""
