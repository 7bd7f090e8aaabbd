"""Synthetic and question-answering tasks."""
