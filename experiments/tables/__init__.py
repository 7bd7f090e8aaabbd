"""Tables of the READMEs and of docs/, rendered from the result files."""
