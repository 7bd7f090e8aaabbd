"""Feed-forwards of a decoder layer."""
