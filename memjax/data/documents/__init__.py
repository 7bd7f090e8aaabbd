"""Documents, tokenizers and tokens."""
