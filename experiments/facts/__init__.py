"""More facts than a cache has entries."""
