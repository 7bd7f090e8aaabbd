"""M+ and MemoryLLM: memory tokens in every layer, and a long-term store."""
