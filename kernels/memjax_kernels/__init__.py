"""Ops, one folder each: `reference.py` is the meaning, the rest is speed."""
