"""Texts of commands: prompts and answers, the loop of a chat, opening of a model."""
