"""Experiments: recurrent."""
