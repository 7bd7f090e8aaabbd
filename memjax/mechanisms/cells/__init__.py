"""Cells: memories of keys and values without a layer around them."""
