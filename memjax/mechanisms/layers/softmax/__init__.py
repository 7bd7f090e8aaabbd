"""Softmax attention: full sequences, caches, windows, and a prefix plus causal mask."""
