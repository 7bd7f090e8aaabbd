"""Checks, choice of implementation, meshes, chunks and products, for all ops."""
