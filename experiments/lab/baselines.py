"""What a memory must beat: windows, full attention, caches, text, and counted n-grams.

Baselines of a memory are given as many bytes as it keeps between two tokens. Models are
made of a pretrained backbone without training; `NGram` counts the training documents:

    p_n(x | h) = (c(h x) + u(h) p_{n-1}(x | h')) / (c(h) + u(h))

c are counts, u(h) the number of different tokens after h, and h' is h without its first
token; p_0 is uniform. Witten & Bell (1991), as in Chen & Goodman (1999),
https://doi.org/10.1006/csla.1999.0128, section 2.4.
"""

import collections
import lzma
import math
from collections.abc import Sequence

import numpy as np

from experiments.lab.measure import join_losses, state_bytes
from memjax.data import TokenisedDocument
from memjax.evaluation import TokenLosses
from memjax.models import LanguageModel
from memjax.models.language_model.retrofit import MemoryHeads
from memjax.models.language_model.windowed import limit_attention


def equal_tokens(model: LanguageModel, tokens: int, heads: MemoryHeads) -> int:
    """Tokens of keys and values with the bytes of a layer's memory, of these heads.

    `tokens` are those of a memory for each query head.
    """
    own = model.config.heads
    shared_by = own.num_heads // own.num_kv_heads if heads == "key_value" else 1
    return -(-tokens // shared_by)


def equal_window(backbone: LanguageModel, size: int, sinks: int = 0) -> int:
    """Tokens of the shortest window, sinks included, with a state of `size` bytes."""
    least = max(1, sinks)
    one, two = (
        state_bytes(limit_attention(backbone, w, sinks)) for w in (least, least + 1)
    )
    return max(least, least - (one - size) // (two - one))


def compressed_bytes(text: bytes) -> int:
    """Size of a text in LZMA2's strongest setting, without headers."""
    settings = [{"id": lzma.FILTER_LZMA2, "preset": lzma.PRESET_EXTREME}]
    return len(lzma.compress(text, lzma.FORMAT_RAW, filters=settings))


#: The order that predicts best of those counted on a few million tokens.
ORDER = 3


class NGram:
    """Counts of the training documents."""

    def __init__(
        self, documents: Sequence[TokenisedDocument], order: int, vocab_size: int
    ):
        """Counts; `order` is n, at least 1."""
        self.order, self.vocab_size = order, vocab_size
        counters = (collections.Counter() for _ in range(3))
        self._pairs, self._totals, self._different = counters
        for document in documents:
            tokens = np.asarray(document.tokens).tolist()
            for length in range(order):
                ends = range(length, len(tokens))
                self._pairs.update(tuple(tokens[i - length : i + 1]) for i in ends)
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

    def losses(self, documents: Sequence[TokenisedDocument]) -> TokenLosses:
        """Of every target of the documents, as `evaluation.token_losses` has them."""
        found = []
        for document in documents:
            tokens = np.asarray(document.tokens).tolist()
            nll = np.zeros(len(tokens) - 1, np.float32)
            for i in range(1, len(tokens)):
                history = tuple(tokens[max(0, i - self.order + 1) : i])
                nll[i - 1] = -math.log(self.probability(history, tokens[i]))
            found.append(nll)
        return join_losses(documents, found)
