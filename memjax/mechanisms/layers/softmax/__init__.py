"""Softmax attention: of whole sequences, of caches, in windows and in trapezoids."""
