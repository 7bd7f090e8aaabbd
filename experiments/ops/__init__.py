"""Experiments: ops."""
