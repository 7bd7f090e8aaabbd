"""Models of flash-linear-attention: their layers, files and names."""
