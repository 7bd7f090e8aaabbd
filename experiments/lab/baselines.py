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

from experiments.lab.measure import state_bytes
from memjax.checks import check_sizes
from memjax.data import TokenisedDocument
from memjax.evaluation import TokenLosses
from memjax.models import LanguageModel
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.retrofit import MemoryHeads
from memjax.models.language_model.snapkv import SnapKVConfig, add_snapkv
from memjax.models.language_model.windowed import (
    limit_attention,
    set_capacity,
    widen_windows,
)


def full_attention(
    model: LanguageModel, backbone: LanguageModel, tokens: int
) -> LanguageModel:
    """The weights of `model` with the backbone's attention, a cache of so many tokens.

    Texts may be longer than those of the pretraining.
    """
    whole = replace_config(model, mechanisms=backbone.config.mechanisms)
    return set_capacity(whole, tokens)


def wide_window(
    model: LanguageModel,
    window: int,
    sinks: int,
    layers: Sequence[int],
    more: int,
) -> LanguageModel:
    """Windows with sinks in all layers, longer by `more` tokens in the chosen ones."""
    narrow = limit_attention(model, window, sinks)
    return widen_windows(narrow, tuple(layers), more)


def equal_tokens(model: LanguageModel, tokens: int, heads: MemoryHeads) -> int:
    """Tokens of keys and values with the bytes of a layer's memory, of these heads.

    Args:
        model: with its heads.
        tokens: of a memory for each query head.
        heads: that have a memory of their own.
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


def sparse_cache(model: LanguageModel, tokens: int, read: int) -> LanguageModel:
    """SnapKV with a cache of so many tokens, `read` of them for what is being read.

    Raises:
        ValueError: if too few tokens are left to select.
    """
    return add_snapkv(model, SnapKVConfig(tokens - read, read))


def compressed_bytes(text: bytes) -> int:
    """Size of a text in LZMA2's strongest setting, without headers."""
    settings = [{"id": lzma.FILTER_LZMA2, "preset": lzma.PRESET_EXTREME}]
    return len(lzma.compress(text, lzma.FORMAT_RAW, filters=settings))


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
        """Of every target of the documents, as `evaluation.token_losses` has them.

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
