"""Baselines of M+: the backbone without a memory, trained on M+'s lessons."""
