"""The decoder: configuration, layers, model and presets."""
