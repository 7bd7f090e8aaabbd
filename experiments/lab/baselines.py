"""How well do counts predict the same tokens? An n-gram, the least a model must beat.

    p_n(x | h) = (c(h x) + u(h) p_{n-1}(x | h')) / (c(h) + u(h))

c are counts in the training documents, u(h) how many different tokens followed h, and
h' is h without its first token; p_0 is uniform. Witten & Bell (1991), as in Chen &
Goodman (1999), https://doi.org/10.1006/csla.1999.0128, section 2.4.
"""

import collections
import math
from collections.abc import Sequence

import numpy as np

from memjax.checks import check_sizes
from memjax.data import TokenisedDocument
from memjax.evaluation import TokenLosses

#: The order that predicts best of those counted on a few million tokens.
ORDER = 3


class NGram:
    """Counts of the training documents.

    Example:
        losses = NGram(train, order=4, vocab_size=4096).losses(test)
    """

    def __init__(
        self, documents: Sequence[TokenisedDocument], order: int, vocab_size: int
    ):
        """Counts; `order` is n, at least 1.

        Raises:
            ValueError: if a size is below 1.
        """
        check_sizes(order=order, vocab_size=vocab_size)
        self.order, self.vocab_size = order, vocab_size
        self._pairs: collections.Counter = collections.Counter()
        for document in documents:
            tokens = np.asarray(document.tokens).tolist()
            for length in range(order):
                ends = range(length, len(tokens))
                self._pairs.update(tuple(tokens[i - length : i + 1]) for i in ends)
        self._totals: collections.Counter = collections.Counter()
        self._different: collections.Counter = collections.Counter()
        for pair, count in self._pairs.items():
            self._totals[pair[:-1]] += count
            self._different[pair[:-1]] += 1

    def probability(self, history: tuple[int, ...], token: int) -> float:
        """Of the next token, given at most `order` - 1 tokens before it."""
        found = 1 / self.vocab_size
        # From no history to all of it: each is mixed with the shorter one before.
        for length in range(len(history) + 1):
            h = history[len(history) - length :]
            different = self._different[h]
            if different:
                count = self._pairs[(*h, token)]
                found = (count + different * found) / (self._totals[h] + different)
        return found

    def losses(
        self, documents: Sequence[TokenisedDocument], order: int | None = None
    ) -> TokenLosses:
        """Of every target of the documents, as `evaluation.losses` has them.

        Args:
            documents: to predict.
            order: of the n-gram, at most the order that was counted; None is that one.

        Raises:
            ValueError: if `order` is not in this range.
        """
        order = self.order if order is None else order
        if not 1 <= order <= self.order:
            raise ValueError(f"order must be in [1, {self.order}], got {order}")
        longest = max(len(d.tokens) for d in documents) - 1
        nll, mask = np.zeros((2, len(documents), longest), np.float32)
        for row, document in enumerate(documents):
            tokens = np.asarray(document.tokens).tolist()
            for i in range(1, len(tokens)):
                history = tuple(tokens[max(0, i - order + 1) : i])
                nll[row, i - 1] = -math.log(self.probability(history, tokens[i]))
            mask[row, : len(tokens) - 1] = 1
        kinds = tuple(document.kind for document in documents)
        return TokenLosses(nll, mask, kinds, tuple(d.name for d in documents))
