"""Experiments: corpus."""
