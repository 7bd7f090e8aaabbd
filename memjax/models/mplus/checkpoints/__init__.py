"""Checkpoints of M+ and MemoryLLM, under the official names."""
