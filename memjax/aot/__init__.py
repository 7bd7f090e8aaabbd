"""Ahead-of-time compilation for TPUs: memory and cost of a run's steps."""
