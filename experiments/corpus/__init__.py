"""Experiments: a larger corpus and the tokenizer."""
