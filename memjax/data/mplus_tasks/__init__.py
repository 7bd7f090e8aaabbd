"""The tasks that M+ is trained on."""
