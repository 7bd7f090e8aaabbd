"""Experiments: M+ and MemoryLLM."""
