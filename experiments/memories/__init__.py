"""Studies of memories: equal bytes, alignment, recall, books."""
