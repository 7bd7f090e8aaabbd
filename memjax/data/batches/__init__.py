"""Endless, deterministic batches of tokens."""
