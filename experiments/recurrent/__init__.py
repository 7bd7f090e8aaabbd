"""Experiments: Trellis, Lattice and other recurrent mechanisms."""
