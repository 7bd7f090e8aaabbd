"""Counted n-grams, the baseline of small language models: Witten-Bell interpolation.

    p_n(x | h) = (c(h x) + u(h) p_{n-1}(x | h')) / (c(h) + u(h))

c(h) counts the context h, u(h) the different tokens behind it, and h' is h without its
first token; p_0 is uniform. Bell, Cleary & Witten, "Text Compression" (1990).
"""

import collections
import math
from collections.abc import Iterable, Sequence

Context = tuple[int, ...]


class NGram:
    """A model of tokens, each given at most `order` - 1 before it in its text."""

    def __init__(self, order: int, vocab_size: int):
        if order < 1:
            raise ValueError(f"order must be at least 1, got {order}")
        self._order, self._vocab_size = order, vocab_size
        self._counts: dict[Context, collections.Counter[int]] = {}

    def count(self, texts: Iterable[Sequence[int]]) -> None:
        """Counts every token of the texts with all its contexts."""
        for text in texts:
            for i, token in enumerate(text):
                for n in range(min(i, self._order - 1) + 1):
                    context = tuple(text[i - n : i])
                    counter = self._counts.setdefault(context, collections.Counter())
                    counter[token] += 1

    def perplexity(self, texts: Iterable[Sequence[int]], order: int) -> float:
        """exp of the mean loss of all tokens but the first of each text.

        Args:
            texts: at least one with two tokens.
            order: of the model that is asked, at most the one that was counted.
        """
        loss, scored = 0.0, 0
        for text in texts:
            for i in range(1, len(text)):
                context = tuple(text[max(0, i - order + 1) : i])
                loss -= math.log(self._probability(context, text[i]))
                scored += 1
        return math.exp(loss / scored)

    def _probability(self, context: Context, token: int) -> float:
        found = 1 / self._vocab_size
        # From no context to the longest, each leaning on the shorter.
        for n in range(len(context) + 1):
            counter = self._counts.get(context[len(context) - n :])
            if counter is None:
                break
            found = (counter[token] + len(counter) * found) / (
                counter.total() + len(counter)
            )
        return found
