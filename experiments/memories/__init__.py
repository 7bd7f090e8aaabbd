"""Studies of memories: equal bytes, recall, books."""
