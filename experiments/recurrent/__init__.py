"""Experiments: Trellis, Lattice and other recurrent mixers."""
