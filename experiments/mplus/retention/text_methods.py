"""Methods that keep text: it is read again, whole or in parts, when a question comes.

The question stands after the last tokens, after the passages that BM25 finds, or alone
("closed book"). What is kept are the ids of tokens, 4 bytes each, on the host: see
`retention.Method`.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.mplus.memories import answer
from experiments.mplus.retention.variants import KeptBytes
from memjax.checks import check_sizes
from memjax.data import Tokenizer
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import set_capacity


class ReRead:
    """The last tokens as text, read again before each question.

    It is `ReReadWindow` whose segments begin at the questions: what is injected is not
    read until then.

    Args:
        model: with full attention, that reads the last tokens and a question.
        chunk: tokens that are read at a time.
        last: n, how many tokens are kept, at least 1.
        question: tokens of question and answer, at most.

    Raises:
        ValueError: if last is below 1, or the model has too few positions.
    """

    def __init__(self, model: LanguageModel, chunk: int, last: int, question: int):
        check_sizes(last=last)
        positions = model.config.capacity
        if positions is not None and last + question > positions:
            raise ValueError(
                f"last must be at most {positions - question}, so that a question of "
                f"{question} tokens has positions, got {last}"
            )
        self.model = set_capacity(model, last + question)
        self.chunk, self.last = chunk, last

    def start(self, batch):
        """No tokens."""
        return np.zeros((batch, 0), np.int32)

    def inject(self, memory, tokens):
        """Keeps the last n tokens."""
        return np.concatenate([memory, np.asarray(tokens)], axis=1)[:, -self.last :]

    def query(self, memory, prompt, count):
        """Reads the tokens and the prompt, and decodes."""
        whole = np.concatenate([memory, prompt], axis=1)
        state = self.model.init_state(len(whole))
        return answer(self.model, state, whole, count, self.chunk)

    def kept(self, injected):
        """The ids."""
        return _ids(min(injected, self.last))


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
        return answer(self.model, state, whole, count, self.chunk)

    def kept(self, injected):
        """The ids of all chunks; none where none is ever found."""
        return _ids(injected if self.num_chunks else 0)

    def _best_chunks(self, chunks, question) -> np.ndarray:
        if self._search is None or not chunks:
            return np.zeros(0, np.int32)
        texts = [self.tokenizer.decode(chunk) for chunk in chunks]
        best = self._search(texts, question, min(self.num_chunks, len(chunks)))
        return np.concatenate([chunks[i] for i in best])


def bm25(
    model: LanguageModel,
    tokenizer: Tokenizer,
    chunk: int,
    num_chunks: int,
    question: int,
) -> Retriever:
    """BM25 with so many chunks in front of the question.

    Args:
        model: the backbone.
        tokenizer: its tokenizer.
        chunk: C.
        num_chunks: that are put in front of the question.
        question: tokens of question and answer, at most.
    """
    capacity = num_chunks * chunk + question
    return Retriever(set_capacity(model, capacity), tokenizer, chunk, num_chunks)


def closed_book(model: LanguageModel, tokenizer: Tokenizer, question: int) -> Retriever:
    """The backbone with the question alone."""
    return Retriever(set_capacity(model, question), tokenizer, question, 0)


def _ids(tokens: int) -> KeptBytes:
    """Tokens that are kept as text."""
    return KeptBytes(0, 4 * tokens)


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
