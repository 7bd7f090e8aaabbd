"""Memories that answer questions about injected text: M+ and its baselines.

A method injects a text chunk by chunk and continues prompts greedily. Its memory is a
value that a query leaves unchanged. Baselines have a state of as many bytes as M+: on
the device alone, or on device and host together, up to the backbone's positions.

Shapes: B batch, C tokens of a chunk, P tokens of a question, N tokens of an answer.
"""

import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int32

from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes, tree_bytes
from experiments.mplus import models
from memjax.data import Tokenizer
from memjax.models import LanguageModel, Sampling, generate
from memjax.models.language_model.snapkv import SnapKVConfig, add_snapkv
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.model import MPlus

#: Methods with M+'s parameters, and methods of the backbone alone.
Memory = Literal["M+", "M+ (attention)", "MemoryLLM"]
Baseline = Literal[
    "full attention",
    "window, device",
    "window, all",
    "re-read, device",
    "re-read, seconds",
    "SnapKV, device",
    "BM25",
    "dense search",
    "closed book",
]
Tokens = Int32[np.ndarray, "B T"]
GREEDY = Sampling(temperature=0.0)
#: First tokens that a window retains: Xiao et al. (2023), section 3.2.
SINKS = 4


class StateBytes(NamedTuple):
    """Size of the state of one text between two tokens, on device and host."""

    device: int
    host: int


class Method(Protocol):
    """A memory that is filled chunk by chunk and queried."""

    def start(self, batch: int) -> Any:
        """The empty memory of `batch` texts."""

    def inject(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after another chunk; may donate the memory that was given."""

    def query(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"] | None:
        """The greedy continuation by `count` tokens; None beyond its positions."""

    def state_bytes(self, injected: int) -> StateBytes:
        """Size of the state of one text after `injected` tokens."""
        ...


class Reader:
    """A language model that reads `chunk` tokens at a time.

    Beyond `room` injected tokens it cannot be asked.
    """

    def __init__(self, model: LanguageModel, chunk: int, room: int = sys.maxsize):
        self.model, self.chunk, self.room = model, chunk, room

    def start(self, batch):
        return self.model.init_state(batch), 0

    def inject(self, memory, tokens):
        state, length = memory[0], memory[1] + tokens.shape[1]
        if length > self.room:
            return None, length
        return _read(*nnx.split(self.model), state, jnp.asarray(tokens)), length

    def query(self, memory, prompt, count):
        if memory[0] is None:
            return None
        return _continue(self.model, memory[0], prompt, count, self.chunk)

    def state_bytes(self, injected):
        return StateBytes(state_bytes(self.model, min(injected, self.room)), 0)


class LatentMemory:
    """M+ or MemoryLLM; the whole question selects what is retrieved."""

    def __init__(self, model: MPlus):
        self.model = model

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
    """Injected text, of which a part is read again before each question.

    `again` tokens are read; 0 is the question alone, "closed book". `select` chooses
    them of text and prompt; without it they are the last, and nothing else is stored.
    """

    def __init__(
        self,
        model: LanguageModel,
        chunk: int,
        again: int,
        question: int,
        select: Callable[[Tokens, Tokens], Tokens] | None = None,
    ):
        self.model = set_capacity(model, again + question)
        self.chunk, self.select = chunk, select
        self.stored = again if select is None else sys.maxsize

    def start(self, batch):
        return np.zeros((batch, 0), np.int32)

    def inject(self, memory, tokens):
        whole = np.concatenate([memory, np.asarray(tokens)], axis=1)
        return whole[:, max(0, whole.shape[1] - self.stored) :]

    def query(self, memory, prompt, count):
        again = memory if self.select is None else self.select(memory, prompt)
        whole = np.concatenate([again, prompt], axis=1)
        state = self.model.init_state(len(whole))
        return _continue(self.model, state, whole, count, self.chunk)

    def state_bytes(self, injected):
        # The ids.
        return StateBytes(0, 4 * min(injected, self.stored))


class DenseSearch:
    """The chunk whose mean state of the last layer is nearest to the question's.

    Each chunk is read once, alone, when it is injected; nearest is by cosine.
    """

    def __init__(self, model: LanguageModel, chunk: int, question: int):
        self.model, self.chunk = model, chunk
        self.best = ReRead(model, chunk, chunk, question)

    def start(self, batch):
        text = np.zeros((batch, 0, self.chunk), np.int32)
        return text, np.zeros((batch, 0, self.model.config.model_dim))

    def inject(self, memory, tokens):
        text, means = memory
        own = np.asarray(_mean_state(*nnx.split(self.model), jnp.asarray(tokens)))
        text = np.append(text, np.asarray(tokens)[:, None], axis=1)
        return text, np.append(means, own[:, None], axis=1)

    def query(self, memory, prompt, count):
        text, means = memory
        own = np.asarray(_mean_state(*nnx.split(self.model), jnp.asarray(prompt)))
        best = np.einsum("bnd,bd->bn", means, own).argmax(axis=1)
        return self.best.query(text[np.arange(len(text)), best], prompt, count)

    def state_bytes(self, injected):
        means = injected // self.chunk * self.model.config.model_dim
        return StateBytes(0, 4 * (injected + means))


def bm25(
    tokenizer: Tokenizer, chunk: int, num_chunks: int, text: Tokens, prompt: Tokens
) -> Tokens:
    """The best chunks of each text for its question, in the order of the text.

    Lucene's BM25 of the package `bm25s` (k1 1.5, b 0.75), English stop words, no stems.
    """
    found = []
    for tokens, question in zip(text, prompt, strict=True):
        chunks = tokens.reshape(-1, chunk)
        texts = [tokenizer.decode(x) for x in chunks]
        best = _search(texts, tokenizer.decode(question), num_chunks)
        found.append(chunks[best].ravel())
    return np.stack(found)


class Sizes(NamedTuple):
    """Numbers of tokens that all methods have in common.

    Attributes:
        device: of a KV cache as large as M+'s state on the device.
        all: of a KV cache as large as all of M+'s state.
        chunk: that are injected or read at a time.
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
        min(equal_window(backbone, x), positions) for x in (size.device, sum(size))
    )
    return Sizes(device, all_, chunk, question, longest)


def read_as_long(backbone: LanguageModel, sizes: Sizes) -> int:
    """Tokens that take the backbone the seconds of a question to M+."""
    tokens = np.zeros((1, sizes.chunk), np.int32)
    half, few, many = sizes.question // 2, sizes.chunk // 8, sizes.chunk

    def seconds(method: Method, injected: int = sizes.chunk) -> float:
        state, began = method.start(1), 0.0
        for _ in range(injected // sizes.chunk):
            state = method.inject(state, tokens)
        # The first compiles.
        for _ in range(3):
            began = time.monotonic()
            method.query(state, tokens[:, :half], half)
        return time.monotonic() - began

    memory = add_mplus(backbone, models.stage(3).memory, key=jax.random.key(0))
    left = seconds(LatentMemory(memory), sizes.longest)
    least, most = (
        seconds(ReRead(backbone, many, x, sizes.question)) for x in (few, many)
    )
    read = few + (left - least) * (many - few) / max(most - least, 1e-6)
    return int(min(max(read, 0), sizes.longest))


def baseline(
    name: Baseline, backbone: LanguageModel, tokenizer: Tokenizer, sizes: Sizes
) -> tuple[str, Method]:
    """A method of the backbone, and its label, which tells its size."""
    chunk, question = sizes.chunk, sizes.question
    match name:
        case "full attention":
            longest = sizes.longest + question
            longest = min(longest, backbone.config.capacity or longest)
            whole = set_capacity(backbone, longest)
            return name, Reader(whole, chunk, longest - question)
        case "window, device" | "window, all":
            size = sizes.device if name == "window, device" else sizes.all
            label = f"window of {size - SINKS:,} tokens and {SINKS} sinks"
            return label, Reader(limit_attention(backbone, size - SINKS, SINKS), chunk)
        case "re-read, device" | "re-read, seconds":
            timed, last = name == "re-read, seconds", sizes.device - question
            last = read_as_long(backbone, sizes) if timed else last
            label = f"last {last:,} tokens read again" + ", in M+'s time" * timed
            return label, ReRead(backbone, chunk, last, question)
        case "SnapKV, device":
            label = f"SnapKV, a cache of {sizes.device:,} tokens"
            # Room for the chunk or question that is read.
            read = max(chunk, question)
            cache = SnapKVConfig(sizes.device - read, read)
            return label, Reader(add_snapkv(backbone, cache), chunk)
        case "BM25":
            label = "BM25, 1 chunk in front of the question"
            best = functools.partial(bm25, tokenizer, chunk, 1)
            return label, ReRead(backbone, chunk, chunk, question, best)
        case "dense search":
            label = "dense search, 1 chunk in front of the question"
            return label, DenseSearch(backbone, chunk, question)
        case "closed book":
            return name, ReRead(backbone, question, 0, question)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).features(memory, tokens)[0]


@functools.partial(jax.jit, static_argnums=0)
def _mean_state(graph, parameters, tokens):
    """The mean of a text's states [B, D], of unit length."""
    model = nnx.merge(graph, parameters)
    _, states = model.features(model.init_state(tokens.shape[0]), tokens)
    mean = states.astype(jnp.float32).mean(axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).inject(memory, tokens)


def _continue(model, state, prompt, count, chunk) -> np.ndarray:
    """Greedy continuation of a prompt."""
    key = jax.random.key(0)
    return generate(
        model, state, prompt, count, key=key, sampling=GREEDY, tokens_per_call=chunk
    ).tokens


def _search(texts: Sequence[str], question: str, count: int) -> list[int]:
    """Indices of the best texts for a question, ascending; ties go to the earlier."""
    # Needed here alone: `pip install bm25s`.
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    tokenize: Any = functools.partial(
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
