"""Tables of the READMEs, rendered from the result files."""
