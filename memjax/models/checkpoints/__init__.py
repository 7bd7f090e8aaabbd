"""Models and memory states in and out of files."""
