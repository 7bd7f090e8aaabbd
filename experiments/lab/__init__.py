"""Machinery shared by all studies."""
