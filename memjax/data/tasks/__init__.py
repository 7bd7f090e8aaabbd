"""Synthetic tasks, needles in haystacks, questions and facts."""
