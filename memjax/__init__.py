"""Long-context memory as pure functions over explicit state."""
