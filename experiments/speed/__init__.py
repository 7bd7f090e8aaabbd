"""Studies of speed and memory."""
