"""Memory cells that are no layer by themselves: they stand beside a window."""
