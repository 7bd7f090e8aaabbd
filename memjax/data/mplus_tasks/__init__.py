"""The training tasks of M+."""
