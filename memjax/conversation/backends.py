"""Reading and answering, by the kind of model.

Most models remember question and answer as they read them into their state. M+ answers
without changing its memory; question and answer are injected afterwards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from memjax.models import Sampling, generate
from memjax.models.base import Model
from memjax.models.generation import read_text
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.reader import MemoryReader

#: Tokens per call of a prompt, padded: one program reads prompts of all lengths.
PROMPT_PER_CALL = 64
#: M+ reads a prompt in one call, padded to a power of two that is at least this.
MIN_PROMPT = 128
#: Turns for which a cache is enlarged at once: each size is another program.
TURNS_AHEAD = 3
#: Tokens per call of a text.
TEXT_PER_CALL = 1024


class Decoding(NamedTuple):
    """Options of `generate` for an answer."""

    max_new_tokens: int
    key: PRNGKeyArray
    sampling: Sampling
    read_before: Sequence[int]
    vocab_size: int
    stop_tokens: Sequence[int]
    stop_when: Callable[[np.ndarray], bool]


class Drawn(NamedTuple):
    """Tokens of an answer, and the log-probability of each."""

    tokens: Int[np.ndarray, " n"]
    log_probs: Float[np.ndarray, " n"]


@runtime_checkable
class Backend(Protocol):
    """Operations of a conversation on a state; they donate no state they are given."""

    def read(
        self,
        state: PyTree,
        tokens: Int[np.ndarray, " T"],
        progress: Callable[[int], object] = lambda count: None,
    ) -> PyTree:
        """The memory after a text; `progress` is called with the tokens read so far."""
        ...

    def answer(
        self,
        state: PyTree,
        prompt: Int[np.ndarray, " T"],
        decoding: Decoding,
        progress: Callable[[int, int], object],
    ) -> tuple[PyTree, Drawn]:
        """A state for `remember`, and an answer to a prompt.

        `progress` is called with the tokens of the prompt read so far, and in total.
        """
        ...

    def remember(
        self,
        state: PyTree,
        after: PyTree,
        said: Int[np.ndarray, " T"],
        closing: Int[np.ndarray, " n"],
    ) -> tuple[PyTree, bool]:
        """The memory after a turn, and whether it has read the closing.

        Args:
            state: before the turn.
            after: result of `answer`.
            said: tokens of prompt and answer.
            closing: tokens after the answer.
        """
        ...


def backend_of(model: Model) -> Backend:
    """The backend for a model."""
    injects = hasattr(model, "inject")
    return InjectionBackend(cast(MPlus, model)) if injects else StateBackend(model)


class StateBackend:
    """For models that read texts into their state."""

    def __init__(self, model: Model):
        self._model = model
        # Whole windows are the fastest.
        window = min(model.window, TEXT_PER_CALL)
        self._tokens_per_call = TEXT_PER_CALL // window * window

    def read(
        self,
        state: PyTree,
        tokens: Int[np.ndarray, " T"],
        progress: Callable[[int], object] = lambda count: None,
    ) -> PyTree:
        """The memory after a text."""
        # Enlarges the cache once.
        state, size = self._model.reserve(state, len(tokens)), self._tokens_per_call
        for start in range(0, len(tokens), size):
            part = tokens[None, start : start + size]
            # The caller still holds the first state.
            state = read_text(
                self._model, state, part, tokens_per_call=size, donate=start > 0
            )
            progress(start + part.shape[1])
        return state

    def answer(
        self,
        state: PyTree,
        prompt: Int[np.ndarray, " T"],
        decoding: Decoding,
        progress: Callable[[int, int], object],
    ) -> tuple[PyTree, Drawn]:
        """The memory after prompt and answer, and the answer."""
        state = self._with_room(state, len(prompt) + decoding.max_new_tokens)
        drawn = generate(
            self._model,
            state,
            prompt[None],
            tokens_per_call=PROMPT_PER_CALL,
            least_per_call=PROMPT_PER_CALL,
            progress=progress,
            **decoding._asdict(),
        )
        return drawn.state, Drawn(drawn.tokens[0], drawn.log_probs[0])

    def _with_room(self, state, count):
        room = self._model.remaining(state)
        if room is None:
            return state
        grown = self._model.reserve(state, count)
        if _shapes(grown) == _shapes(state):
            return state
        return self._model.reserve(state, min(room, TURNS_AHEAD * count))

    def remember(
        self,
        state: PyTree,
        after: PyTree,
        said: Int[np.ndarray, " T"],
        closing: Int[np.ndarray, " n"],
    ) -> tuple[PyTree, bool]:
        """The state after the answer; the closing is still to be read."""
        return after, False


class InjectionBackend:
    """For M+ and MemoryLLM."""

    def __init__(self, model: MPlus):
        self._model = model

    def read(
        self,
        state: PyTree,
        tokens: Int[np.ndarray, " T"],
        progress: Callable[[int], object] = lambda count: None,
    ) -> PyTree:
        """The memory after a text; an incomplete chunk is buffered in the state."""
        size = self._model.window
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            # Padded to one length: programs are compiled by shape.
            padded = np.zeros((1, size), np.int32)
            padded[0, : len(part)] = part
            lengths = jnp.asarray([len(part)], jnp.int32)
            state = self._model.inject(state, jnp.asarray(padded), lengths)
            progress(start + len(part))
        return state

    def answer(
        self,
        state: PyTree,
        prompt: Int[np.ndarray, " T"],
        decoding: Decoding,
        progress: Callable[[int, int], object],
    ) -> tuple[PyTree, Drawn]:
        """None, and the answer; the last token of the prompt is no retrieval query."""
        reader, count = MemoryReader(self._model, state), len(prompt) - 1
        size = max(MIN_PROMPT, 1 << (count - 1).bit_length())
        padded = np.zeros((1, size), np.int32)
        padded[0, :count] = prompt[:-1]
        # A power of two, as for the prompt.
        room = 1 << decoding.max_new_tokens.bit_length()
        lengths = jnp.asarray([count], jnp.int32)
        cache = reader.begin(state, jnp.asarray(padded), lengths, room=room)
        drawn = generate(reader, cache, prompt[None, -1:], **decoding._asdict())
        return None, Drawn(drawn.tokens[0], drawn.log_probs[0])

    def remember(
        self,
        state: PyTree,
        after: PyTree,
        said: Int[np.ndarray, " T"],
        closing: Int[np.ndarray, " n"],
    ) -> tuple[PyTree, bool]:
        """The memory with prompt, answer and closing injected."""
        return self.read(state, np.concatenate([said, closing])), True


def _shapes(state):
    return [leaf.shape for leaf in jax.tree.leaves(state)]
