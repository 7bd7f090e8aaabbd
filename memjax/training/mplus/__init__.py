"""Training steps, losses and retriever fits of M+."""
