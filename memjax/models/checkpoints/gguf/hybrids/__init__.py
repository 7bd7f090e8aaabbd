"""Models with recurrent layers in GGUF files: their entries and tensor names."""
