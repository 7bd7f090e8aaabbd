"""Studies of memories: equal bytes, alignment, recall, notes, books."""
