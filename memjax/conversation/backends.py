"""To read and to answer, for every kind of model.

A model that reads on remembers a question and its answer by reading them. M+ answers
from a memory that stays as it is, and what was said is then injected.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

from memjax.models import Sampling, generate
from memjax.models.base import Model
from memjax.models.generation import read_text
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.reader import MemoryReader

#: A question is read so many tokens at a time, the last of them padding: one program
#: reads questions of all lengths.
PIECE = 64
#: M+ reads a whole question at once, padded to a power of two, and at least to this.
LEAST_PROMPT = 128
#: Turns that a cache gets slots for at once: a larger one is another program.
TURNS_AHEAD = 3
#: Tokens of a text that are read at a time.
SEGMENT = 1024


class Decoding(NamedTuple):
    """How an answer is drawn.

    Attributes:
        max_new_tokens: most tokens of an answer.
        key: of the draws.
        sampling: how.
        stop_tokens: that end an answer.
        stop_when: see `generate`.
    """

    max_new_tokens: int
    key: PRNGKeyArray
    sampling: Sampling
    stop_tokens: Sequence[int]
    stop_when: Callable[[np.ndarray], bool]


@runtime_checkable
class Backend(Protocol):
    """What a conversation does with a memory. States that are given stay usable."""

    def read(
        self,
        state: PyTree,
        tokens: Int[np.ndarray, " T"],
        progress: Callable[[int], object] = lambda count: None,
    ) -> PyTree:
        """The memory after a text; `progress` is called with the tokens read so far."""
        ...

    def answer(
        self, state: PyTree, prompt: Int[np.ndarray, " T"], draws: Decoding
    ) -> tuple[PyTree, Int[np.ndarray, " n"]]:
        """What `remember` needs, and an answer to a prompt."""
        ...

    def remember(
        self,
        state: PyTree,
        after: PyTree,
        said: Int[np.ndarray, " T"],
        closing: Sequence[int],
    ) -> tuple[PyTree, list[int]]:
        """The memory after a turn, and the tokens that are yet to be read.

        Args:
            state: before the turn.
            after: of `answer`.
            said: tokens of prompt and answer.
            closing: what follows them.
        """
        ...


def backend_of(model: Model) -> Backend:
    """Those of a model."""
    return InjectionBackend(model) if isinstance(model, MPlus) else StateBackend(model)


class StateBackend:
    """For models whose state is all that they remember."""

    def __init__(self, model: Model):
        self._model = model
        # Whole windows are quick to read.
        window = min(model.window, SEGMENT)
        self._segment = SEGMENT // window * window

    def read(
        self,
        state: PyTree,
        tokens: Int[np.ndarray, " T"],
        progress: Callable[[int], object] = lambda count: None,
    ) -> PyTree:
        """The memory after a text."""
        # A cache gets its size at once.
        state, size = self._model.reserve(state, len(tokens)), self._segment
        for start in range(0, len(tokens), size):
            part = tokens[None, start : start + size]
            # What was given stays usable; what follows is this function's own.
            state = read_text(self._model, state, part, segment=size, donate=start > 0)
            progress(start + part.shape[1])
        return state

    def answer(
        self, state: PyTree, prompt: Int[np.ndarray, " T"], draws: Decoding
    ) -> tuple[PyTree, Int[np.ndarray, " n"]]:
        """The memory after prompt and answer, and the answer."""
        state = self._with_room(state, len(prompt) + draws.max_new_tokens)
        drawn = generate(
            self._model,
            state,
            prompt[None],
            segment=PIECE,
            least_segment=PIECE,
            **draws._asdict(),
        )
        return drawn.state, drawn.tokens[0]

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
        closing: Sequence[int],
    ) -> tuple[PyTree, list[int]]:
        """The state has read all but the closing, which the next prompt begins with."""
        return after, list(closing)


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
        """The memory after a text; what fills no chunk stays in the open one."""
        size = self._model.window
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            # Of one length: programs are compiled by shape.
            padded = np.zeros((1, size), np.int32)
            padded[0, : len(part)] = part
            lengths = jnp.asarray([len(part)], jnp.int32)
            state = self._model.inject(state, jnp.asarray(padded), lengths)
            progress(start + len(part))
        return state

    def answer(
        self, state: PyTree, prompt: Int[np.ndarray, " T"], draws: Decoding
    ) -> tuple[PyTree, Int[np.ndarray, " n"]]:
        """None, and the answer. All of the prompt but its last token chooses rows."""
        reader, count = MemoryReader(self._model, state), len(prompt) - 1
        size = max(LEAST_PROMPT, 1 << (count - 1).bit_length())
        padded = np.zeros((1, size), np.int32)
        padded[0, :count] = prompt[:-1]
        # A power of two, as for the prompt.
        room = 1 << draws.max_new_tokens.bit_length()
        lengths = jnp.asarray([count], jnp.int32)
        cache = reader.begin(state, jnp.asarray(padded), lengths, room=room)
        drawn = generate(reader, cache, prompt[None, -1:], **draws._asdict())
        return None, drawn.tokens[0]

    def remember(
        self,
        state: PyTree,
        after: PyTree,
        said: Int[np.ndarray, " T"],
        closing: Sequence[int],
    ) -> tuple[PyTree, list[int]]:
        """Injects what was said, and its closing."""
        return self.read(
            state, np.concatenate([said, np.asarray(closing, np.int32)])
        ), []


def _shapes(state):
    return [leaf.shape for leaf in jax.tree.leaves(state)]
