"""Methods that keep what a model has computed: see `retention.Method`.

M+ and MemoryLLM, full attention, a window with sinks, a cache of SnapKV. Those that
keep text are in `text_methods.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.lab.measure import tree_bytes
from experiments.mplus.retention.variants import KeptBytes, kept_bytes
from memjax.models import LanguageModel, Sampling, generate
from memjax.models.language_model.snapkv import SnapKVConfig, with_snapkv
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.model import MPlus

GREEDY = Sampling(temperature=0.0)


class Reader:
    """Any model of the library; injecting is reading the chunk.

    Args:
        model: the model.
        chunk: tokens of a question that are read at a time.
    """

    def __init__(self, model: LanguageModel, chunk: int):
        self.model, self.chunk = model, chunk

    def start(self, batch):
        """An empty memory."""
        return self.model.init_state(batch)

    def inject(self, memory, tokens):
        """Reads the chunk; donates the memory that was given."""
        return _read_chunk(*nnx.split(self.model), memory, jnp.asarray(tokens))

    def query(self, memory, prompt, count):
        """Reads the prompt and decodes."""
        return answer(self.model, memory, prompt, count, self.chunk)

    def kept(self, injected):
        """The state; of full attention, with a slot for every token."""
        state = jax.eval_shape(lambda: self.model.init_state(1, injected))
        return KeptBytes(tree_bytes(state), 0)


class Full:
    """Full attention while the model's positions last; then it cannot be asked.

    Args:
        model: the backbone.
        chunk: C.
        tokens: the longest text with its question and answer.
        question: tokens of question and answer, at most.
    """

    def __init__(self, model: LanguageModel, chunk: int, tokens: int, question: int):
        longest = min(tokens, model.config.capacity or tokens)
        self._reader = Reader(set_capacity(model, longest), chunk)
        self._room = longest - question

    def start(self, batch):
        """An empty cache, and the number of its tokens."""
        return self._reader.start(batch), 0

    def inject(self, memory, tokens):
        """Reads the chunk if it has positions."""
        cache, length = memory[0], memory[1] + tokens.shape[1]
        if length <= self._room:
            return self._reader.inject(cache, tokens), length
        return None, length

    def query(self, memory, prompt, count):
        """Answers from the cache; None where it could not be kept."""
        if memory[0] is None:
            return None
        return self._reader.query(memory[0], prompt, count)

    def kept(self, injected):
        """The cache, as long as it can be."""
        return self._reader.kept(min(injected, self._room))


class LatentMemory:
    """M+ or MemoryLLM: writes each chunk, and retrieves by the whole question.

    Args:
        model: the model.
    """

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

    def kept(self, injected):
        """Pool and store, whose size does not depend on what was injected."""
        return kept_bytes(self.model)


def window(model: LanguageModel, chunk: int, tokens: int, sinks: int) -> Reader:
    """A sliding window of so many tokens, beside the first `sinks` of the text."""
    return Reader(limit_attention(model, tokens, sinks), chunk)


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


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_chunk(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).features(memory, tokens)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write_chunk(graph, parameters, memory, tokens):
    return nnx.merge(graph, parameters).inject(memory, tokens)


def answer(model, state, prompt, count, chunk) -> np.ndarray:
    """Greedy continuation of a prompt."""
    key = jax.random.key(0)
    return generate(
        model, state, prompt, count, key=key, sampling=GREEDY, segment=chunk
    ).tokens
