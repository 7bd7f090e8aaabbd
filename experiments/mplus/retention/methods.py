"""The methods whose retention is measured: see `retention.Method`.

M+ and MemoryLLM, and what they are compared with, all on one backbone: full attention
as far as its positions go; a window, or a cache of SnapKV, of as much memory as M+ has;
the question after the passages that BM25 finds; the question alone ("closed book").
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
    """Any model of the library; injecting is reading the chunk.

    Args:
        model: the model.
        chunk: tokens of a question that are read at a time.
        longest: see `Method`; None for a model whose memory is bounded.
    """

    def __init__(self, model: LanguageModel, chunk: int, longest: int | None = None):
        self.model, self.chunk, self.longest = model, chunk, longest

    def start(self, batch):
        """An empty memory."""
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        """Reads the chunk; donates the memory that was given."""
        return _read_chunk(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        """Reads the prompt and decodes."""
        return _answer(self.model, memory, prompt, count, self.chunk)


class LatentMemory:
    """M+ or MemoryLLM: writes each chunk, and retrieves by the whole question.

    Args:
        model: the model.
    """

    longest = None

    def __init__(self, model: MPlus):
        self.model = model

    def start(self, batch):
        """The memory at the start of a sequence."""
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        """Writes full chunks and keeps the rest pending; donates the memory."""
        return _write_chunk(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        """Reads the prompt with the memory and decodes from the same KV cache."""
        prompt, key = jnp.asarray(prompt), jax.random.key(0)
        return np.asarray(
            self.model.generate(memory, prompt, count, key=key, sampling=GREEDY)
        )


class Retriever:
    """BM25 over the injected chunks; the best ones are put in front of the question.

    Lucene's BM25 of the package `bm25s` (k1 1.5, b 0.75), English stop words, no stems.
    The chunks found keep the order in which they were injected.

    Args:
        model: with full attention, that reads chunks and question.
        tokenizer: chunks are indexed as text.
        chunk: C, tokens of a chunk.
        num_chunks: how many are put in front, in [0, ...]; 0 is "closed book".

    Raises:
        ValueError: if num_chunks is below 0.
        ImportError: without the package `bm25s`, unless num_chunks is 0.
    """

    longest = None

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, chunk: int, num_chunks: int
    ):
        if num_chunks < 0:
            raise ValueError(f"num_chunks must be at least 0, got {num_chunks}")
        self.model, self.tokenizer = model, tokenizer
        self.chunk, self.num_chunks = chunk, num_chunks
        self._search = functools.partial(_search, _bm25s()) if num_chunks else None

    def start(self, batch):
        """No chunks for any batch element."""
        return tuple(() for _ in range(batch))

    def inject(self, memory, tokens):
        """Keeps the tokens of the chunk."""
        pairs = zip(memory, np.asarray(tokens), strict=True)
        return tuple((*chunks, chunk) for chunks, chunk in pairs)

    def query(self, memory, prompt, count):
        """Searches, reads what was found and the prompt, and decodes."""
        found = [
            self._best_chunks(chunks, self.tokenizer.decode(question))
            for chunks, question in zip(memory, prompt, strict=True)
        ]
        whole = np.concatenate([np.stack(found), prompt], axis=1)
        state = self.model.init_state(len(whole))
        return _answer(self.model, state, whole, count, self.chunk)

    def _best_chunks(self, chunks, question) -> np.ndarray:
        if self._search is None or not chunks:
            return np.zeros(0, np.int32)
        texts = [self.tokenizer.decode(chunk) for chunk in chunks]
        best = self._search(texts, question, min(self.num_chunks, len(chunks)))
        return np.concatenate([chunks[i] for i in best])


def full(model: LanguageModel, chunk: int, tokens: int) -> Reader:
    """Full attention over up to `tokens` tokens, or as many as the model has room for.

    Args:
        model: the backbone.
        chunk: C.
        tokens: the longest sample, its question and answer.
    """
    longest = min(tokens, model.config.capacity or tokens)
    return Reader(with_capacity(model, longest), chunk, longest)


def window(model: LanguageModel, chunk: int, tokens: int) -> Reader:
    """A sliding window of so many tokens."""
    return Reader(with_window(model, tokens), chunk)


def snapkv(model: LanguageModel, chunk: int, tokens: int, question: int) -> Reader:
    """A cache of so many tokens, with room for the chunk or question that is read.

    Args:
        model: the backbone.
        chunk: C.
        tokens: of the whole cache.
        question: tokens of question and answer, at most.

    Raises:
        ValueError: if too few tokens are left to keep.
    """
    room = max(chunk, question)
    return Reader(with_snapkv(model, SnapKVConfig(tokens - room, room)), chunk)


def bm25(
    model: LanguageModel, tokenizer: Tokenizer, chunk: int, tokens: int, question: int
) -> Retriever:
    """BM25 with as many chunks as fit in `tokens` tokens, at least one.

    Args:
        model: the backbone.
        tokenizer: its tokenizer.
        chunk: C.
        tokens: of the chunks in front of the question.
        question: tokens of question and answer, at most.
    """
    num_chunks = max(1, tokens // chunk)
    capacity = num_chunks * chunk + question
    return Retriever(with_capacity(model, capacity), tokenizer, chunk, num_chunks)


def closed_book(model: LanguageModel, tokenizer: Tokenizer, question: int) -> Retriever:
    """The backbone with the question alone."""
    return Retriever(with_capacity(model, question), tokenizer, question, 0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_chunk(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).features(memory, tokens)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write_chunk(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).inject(memory, tokens)


def _answer(model, state, prompt, count, chunk) -> np.ndarray:
    """Greedy continuation of a prompt."""
    key = jax.random.key(0)
    return generate(
        model, state, prompt, count, key=key, sampling=GREEDY, segment=chunk
    ).tokens


def _bm25s() -> Any:
    """The package, without its messages about every index."""
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("BM25 needs the package bm25s: pip install bm25s") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _search(bm25s: Any, texts: Sequence[str], question: str, count: int) -> list[int]:
    """Indices of the best texts for a question, ascending; ties go to the earlier."""
    tokenize = functools.partial(
        bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False
    )
    words, query = tokenize(list(texts)), tokenize([question])[0]
    # BM25 has no score for an empty index or query; the first texts are as good.
    if not any(words) or not query:
        return list(range(count))
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    scores = index.get_scores(query)
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())
