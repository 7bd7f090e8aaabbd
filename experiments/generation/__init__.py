"""Experiments: generation with a pretrained model."""
