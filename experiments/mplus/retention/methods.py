"""The methods whose retention is measured: see `retention.Method`.

M+ and MemoryLLM, and what they are compared with, all on one backbone: full attention
as far as its positions go; a window, or a cache of SnapKV, of as much memory as M+ has;
the question behind the passages that BM25 finds; the question alone ("closed book").
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax.data import Tokenizer
from memjax.models import LanguageModel, Sampling, generate
from memjax.models.language_model.snapkv import SnapKVConfig, with_snapkv
from memjax.models.language_model.windowed import with_capacity, with_window
from memjax.models.mplus.model import MPlus

GREEDY = Sampling(temperature=0.0)


class Reader:
    """Any model of the library, which reads what it is told.

    Args:
        model: the model.
        piece: tokens of a question that are read at a time.
        longest: see `Method`; None for a model whose memory is bounded.
    """

    def __init__(self, model: LanguageModel, piece: int, longest: int | None = None):
        self.model, self.piece, self.longest = model, piece, longest

    def start(self, batch):
        """An empty memory."""
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        """Reads them; the memory that was given is gone."""
        return _read(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        """Reads the prompt and decodes."""
        return _answer(self.model, memory, prompt, count, self.piece)


class LatentMemory:
    """M+ or MemoryLLM: writes what it is told, and retrieves by the whole question.

    Args:
        model: the model.
    """

    longest = None

    def __init__(self, model: MPlus):
        self.model = model

    def start(self, batch):
        """The memory a text starts from."""
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        """Writes full chunks; the rest waits. The memory that was given is gone."""
        return _write(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        """Reads the prompt with the memory and decodes with the same reading."""
        prompt, key = jnp.asarray(prompt), jax.random.key(0)
        return np.asarray(
            self.model.generate(memory, prompt, count, key=key, sampling=GREEDY)
        )


class Retriever:
    """BM25 over the pieces it was told, the best in front of the question.

    Lucene's BM25 of the package `bm25s` (k1 1.5, b 0.75), English stop words, no stems.
    The pieces stand in the order in which they were told.

    Args:
        model: with full attention, that reads pieces and question.
        tokenizer: pieces are indexed as text.
        piece: C, tokens of a piece.
        pieces: how many are put in front, in [0, ...]; 0 is "closed book".

    Raises:
        ValueError: if pieces is below 0.
        ImportError: without the package `bm25s`, unless pieces is 0.
    """

    longest = None

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, piece: int, pieces: int
    ):
        if pieces < 0:
            raise ValueError(f"pieces must be at least 0, got {pieces}")
        self.model, self.tokenizer = model, tokenizer
        self.piece, self.pieces = piece, pieces
        self._search = functools.partial(_search, _bm25s()) if pieces else None

    def start(self, batch):
        """No piece in any row."""
        return tuple(() for _ in range(batch))

    def inject(self, memory, tokens):
        """Keeps them as they are."""
        rows = zip(memory, np.asarray(tokens), strict=True)
        return tuple((*pieces, row) for pieces, row in rows)

    def query(self, memory, prompt, count):
        """Searches, reads what was found and the prompt, and decodes."""
        found = [
            self._found(pieces, self.tokenizer.decode(row))
            for pieces, row in zip(memory, prompt, strict=True)
        ]
        whole = np.concatenate([np.stack(found), prompt], axis=1)
        state = self.model.init_state(len(whole))
        return _answer(self.model, state, whole, count, self.piece)

    def _found(self, pieces, question) -> np.ndarray:
        if self._search is None or not pieces:
            return np.zeros(0, np.int32)
        texts = [self.tokenizer.decode(piece) for piece in pieces]
        best = self._search(texts, question, min(self.pieces, len(pieces)))
        return np.concatenate([pieces[i] for i in best])


def full(model: LanguageModel, piece: int, tokens: int) -> Reader:
    """Full attention over up to `tokens` tokens, or as many as the model has room for.

    Args:
        model: the backbone.
        piece: C.
        tokens: the longest sample, its question and answer.
    """
    longest = min(tokens, model.config.capacity or tokens)
    return Reader(with_capacity(model, longest), piece, longest)


def window(model: LanguageModel, piece: int, tokens: int) -> Reader:
    """A sliding window of so many tokens."""
    return Reader(with_window(model, tokens), piece)


def snapkv(model: LanguageModel, piece: int, tokens: int, question: int) -> Reader:
    """A cache of so many tokens, with what is free for the piece or question it reads.

    Args:
        model: the backbone.
        piece: C.
        tokens: of the whole cache.
        question: tokens of question and answer, at most.

    Raises:
        ValueError: if too few tokens are left to keep.
    """
    room = max(piece, question)
    return Reader(with_snapkv(model, SnapKVConfig(tokens - room, room)), piece)


def bm25(
    model: LanguageModel, tokenizer: Tokenizer, piece: int, tokens: int, question: int
) -> Retriever:
    """BM25 with as many pieces as have so many tokens, one at least.

    Args:
        model: the backbone.
        tokenizer: its tokenizer.
        piece: C.
        tokens: of the pieces in front.
        question: tokens of question and answer, at most.
    """
    pieces = max(1, tokens // piece)
    return Retriever(
        with_capacity(model, pieces * piece + question), tokenizer, piece, pieces
    )


def closed_book(model: LanguageModel, tokenizer: Tokenizer, question: int) -> Retriever:
    """The backbone, which is told nothing."""
    return Retriever(with_capacity(model, question), tokenizer, question, 0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).features(memory, tokens)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).inject(memory, tokens)


def _answer(model, state, prompt, count, piece) -> np.ndarray:
    """Greedy tokens behind a prompt."""
    key = jax.random.key(0)
    return generate(
        model, state, prompt, count, key=key, sampling=GREEDY, segment=piece
    )[1]


def _bm25s() -> Any:
    """The package, without its messages about every index."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("BM25 needs the package bm25s: pip install bm25s") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _search(bm25s: Any, texts: Sequence[str], question: str, count: int) -> list[int]:
    """The best texts for a question, in their own order; ties go to the earlier."""
    tokenize = functools.partial(
        bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False
    )
    words, asked = tokenize(list(texts)), tokenize([question])[0]
    if not any(words) or not asked:
        return list(range(count))
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    scores = index.get_scores(asked)
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())
