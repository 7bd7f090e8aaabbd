"""GGUF files, llama.cpp's: configuration, tensors and tokenizer."""
