"""Experiments: what M+ retains."""
