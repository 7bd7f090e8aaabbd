"""Memories that answer questions about injected text: M+ and its baselines.

A method injects a text chunk by chunk and continues prompts greedily. Its memory is a
value that a query leaves unchanged. Baselines have a state of as many bytes as M+: on
the device alone, or on device and host together, up to the backbone's positions.

Shapes: B batch, C tokens of a chunk, P tokens of a question, N tokens of an answer.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int32

from experiments.lab.baselines import equal_window, sparse_cache
from experiments.lab.measure import tree_bytes
from memjax.checks import check_sizes
from memjax.data import Tokenizer
from memjax.models import LanguageModel, Sampling, generate
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions, read_closed

#: Methods with M+'s parameters, and methods of the backbone alone.
Memory = Literal["M+", "M+ (attention)", "MemoryLLM"]
Baseline = Literal[
    "full attention",
    "window, device",
    "window, all",
    "re-read, device",
    "SnapKV, device",
    "BM25",
    "closed book",
]
NAMES = (*get_args(Memory), *get_args(Baseline))
GREEDY = Sampling(temperature=0.0)
#: First tokens that a window retains: Xiao et al. (2023), section 3.2.
SINKS = 4


class StateBytes(NamedTuple):
    """Size of the state of one text between two tokens, on device and host."""

    device: int
    host: int

    @property
    def total(self) -> int:
        """On both: memory on the host is not free."""
        return self.device + self.host


class Method(Protocol):
    """A memory that is filled chunk by chunk and queried."""

    def start(self, batch: int) -> Any:
        """The empty memory of `batch` texts."""
        ...

    def inject(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after another chunk; may donate the memory that was given."""
        ...

    def query(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"] | None:
        """The greedy continuation by `count` tokens; None beyond its positions."""
        ...

    def state_bytes(self, injected: int) -> StateBytes:
        """Size of the state of one text after `injected` tokens."""
        ...


class Reader:
    """A language model, which reads injected text.

    Args:
        model: the model.
        chunk: tokens of a question that are read at a time.
    """

    def __init__(self, model: LanguageModel, chunk: int):
        self.model, self.chunk = model, chunk

    @staticmethod
    def features(model, memory, tokens, prompt):
        """Features of a text that is read after the memory."""
        return model.features(memory, tokens)[1]

    def start(self, batch):
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        return _read(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        return _continue(self.model, memory, prompt, count, self.chunk)

    def state_bytes(self, injected):
        state = jax.eval_shape(lambda: self.model.init_state(1, injected))
        return StateBytes(tree_bytes(state), 0)


class FullAttention:
    """Full attention up to the backbone's positions; beyond, it cannot be asked.

    Args:
        model: the backbone.
        chunk: C.
        tokens: of the longest text, its question and answer.
        question: tokens of question and answer, at most.
    """

    def __init__(self, model: LanguageModel, chunk: int, tokens: int, question: int):
        longest = min(tokens, model.config.capacity or tokens)
        self._reader = Reader(set_capacity(model, longest), chunk)
        self._room = longest - question

    def start(self, batch):
        return self._reader.start(batch), 0

    def inject(self, memory, tokens):
        cache, length = memory[0], memory[1] + tokens.shape[1]
        if length > self._room:
            return None, length
        return self._reader.inject(cache, tokens), length

    def query(self, memory, prompt, count):
        if memory[0] is None:
            return None
        return self._reader.query(memory[0], prompt, count)

    def state_bytes(self, injected):
        return self._reader.state_bytes(min(injected, self._room))


class LatentMemory:
    """M+ or MemoryLLM; the whole question selects what is retrieved."""

    def __init__(self, model: MPlus):
        self.model = model

    @staticmethod
    def features(model, memory, tokens, prompt):
        """Features of a text, of which the prompt alone selects what is retrieved."""
        options = ReadOptions(prompt_length=prompt)
        return read_closed(model.weights, memory, tokens, options)[1]

    def start(self, batch):
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        return _write(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        prompt, key = jnp.asarray(prompt), jax.random.key(0)
        found = self.model.generate(memory, prompt, count, key=key, sampling=GREEDY)
        return np.asarray(found)

    def state_bytes(self, injected=0):
        """Pool and store; the rows of a learned retriever's store are on the host."""
        state = jax.eval_shape(lambda: self.model.init_state(1))
        by_attention, store = self.model.config.by_attention, state.store
        rows = [] if store is None or by_attention else [x.rows for x in store.layers]
        host = tree_bytes(rows)
        return StateBytes(tree_bytes(state) - host, host)


class ReRead:
    """The last tokens as text, which are read again before each question.

    Args:
        model: with full attention.
        chunk: tokens that are read at a time.
        last: number of tokens that are stored, at least 1.
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
        return np.zeros((batch, 0), np.int32)

    def inject(self, memory, tokens):
        return np.concatenate([memory, np.asarray(tokens)], axis=1)[:, -self.last :]

    def query(self, memory, prompt, count):
        whole = np.concatenate([memory, prompt], axis=1)
        state = self.model.init_state(len(whole))
        return _continue(self.model, state, whole, count, self.chunk)

    def state_bytes(self, injected):
        # The ids.
        return StateBytes(0, 4 * min(injected, self.last))


class BM25:
    """All chunks as text; the best ones are read in front of the question.

    Lucene's BM25 of the package `bm25s` (k1 1.5, b 0.75), English stop words, no stems.
    Retrieved chunks are read in the order of their injection.

    Args:
        model: with full attention.
        tokenizer: chunks are indexed as text.
        chunk: C.
        num_chunks: retrieved chunks; 0 is the question alone, "closed book".
        question: tokens of question and answer, at most.

    Raises:
        ImportError: without the package `bm25s`, unless num_chunks is 0.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        chunk: int,
        num_chunks: int,
        question: int,
    ):
        self.model = set_capacity(model, num_chunks * chunk + question)
        self.tokenizer, self.num_chunks = tokenizer, num_chunks
        self.chunk = chunk if num_chunks else question
        self._search = functools.partial(_search, _bm25s()) if num_chunks else None

    def start(self, batch):
        return tuple(() for _ in range(batch))

    def inject(self, memory, tokens):
        pairs = zip(memory, np.asarray(tokens), strict=True)
        return tuple((*chunks, chunk) for chunks, chunk in pairs)

    def query(self, memory, prompt, count):
        pairs = zip(memory, prompt, strict=True)
        found = [self.best_chunks(x, self.tokenizer.decode(y)) for x, y in pairs]
        whole = np.concatenate([np.stack(found), prompt], axis=1)
        state = self.model.init_state(len(whole))
        return _continue(self.model, state, whole, count, self.chunk)

    def state_bytes(self, injected):
        return StateBytes(0, 4 * injected if self.num_chunks else 0)

    def best_chunks(self, chunks, question: str) -> Int32[np.ndarray, " _"]:
        """The retrieved chunks one after another."""
        if self._search is None or not chunks:
            return np.zeros(0, np.int32)
        texts = [self.tokenizer.decode(chunk) for chunk in chunks]
        best = self._search(texts, question, min(self.num_chunks, len(chunks)))
        return np.concatenate([chunks[i] for i in best])


class Sizes(NamedTuple):
    """Numbers of tokens that all methods have in common.

    Attributes:
        device: of a KV cache as large as M+'s state on the device.
        all: of a KV cache as large as all of M+'s state.
        chunk: that are read at a time.
        question: of question and answer, at most.
        longest: that are injected before the last question.
    """

    device: int
    all: int
    chunk: int
    question: int
    longest: int


def sizes_for(model: MPlus, *, chunk: int, question: int, longest: int) -> Sizes:
    """The sizes of the baselines of an M+."""
    size, backbone = LatentMemory(model).state_bytes(), model.backbone
    positions = backbone.config.capacity or longest + question
    device, all_ = (
        min(equal_window(backbone, x), positions) for x in (size.device, size.total)
    )
    return Sizes(device, all_, chunk, question, longest)


def baseline(
    name: Baseline, backbone: LanguageModel, tokenizer: Tokenizer, sizes: Sizes
) -> tuple[str, Method]:
    """A method of the backbone, and its label, which tells its size."""
    chunk, question = sizes.chunk, sizes.question
    match name:
        case "full attention":
            longest = sizes.longest + question
            return name, FullAttention(backbone, chunk, longest, question)
        case "window, device" | "window, all":
            size = sizes.device if name == "window, device" else sizes.all
            label = f"window of {size - SINKS:,} tokens and {SINKS} sinks"
            return label, Reader(limit_attention(backbone, size - SINKS, SINKS), chunk)
        case "re-read, device":
            last = sizes.device - question
            label = f"last {last:,} tokens read again"
            return label, ReRead(backbone, chunk, last, question)
        case "SnapKV, device":
            label = f"SnapKV, a cache of {sizes.device:,} tokens"
            # Room for the chunk or question that is read.
            model = sparse_cache(backbone, sizes.device, max(chunk, question))
            return label, Reader(model, chunk)
        case "BM25":
            label = "BM25, 1 chunk in front of the question"
            return label, BM25(backbone, tokenizer, chunk, 1, question)
        case "closed book":
            return name, BM25(backbone, tokenizer, chunk, 0, question)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).features(memory, tokens)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).inject(memory, tokens)


def _continue(model, state, prompt, count, chunk) -> np.ndarray:
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
