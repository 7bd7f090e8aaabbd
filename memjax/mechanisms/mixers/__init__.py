"""Layers of published models, each a mechanism of its own and no cell of a hybrid."""
