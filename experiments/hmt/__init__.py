"""Experiments: HMT and RMT."""
