"""A conversation with a model, in a memory that lasts.

Shapes: T tokens of a text or a question.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int, PyTree

import memjax
from memjax.checks import check_seed, check_sizes
from memjax.config_io import to_record
from memjax.conversation.backends import Decoding, backend_of
from memjax.conversation.memory_folder import MemoryFolder
from memjax.conversation.prompt_format import choose_format, closing_tokens, stop_tokens
from memjax.conversation.record import Entry, Record, owner_of, parse_record
from memjax.conversation.streaming import printer
from memjax.data.documents.tokenizer import encode_prompt
from memjax.models import Sampling
from memjax.models.base import Model
from memjax.models.checkpoints.memory_state import (
    load_memory,
    read_note,
    save_memory,
)
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from memjax.models.language_model.config import Dtype


class Answer(NamedTuple):
    """What a model says.

    Attributes:
        text: without white space around it.
        tokens: how many were drawn.
        ended: whether it came to its end, before its limit or an interruption.
    """

    text: str
    tokens: int
    ended: bool


class Conversation:
    """Tells a model texts, asks it, and talks with it; what it read stays.

    Any model of the library: one that reads on remembers by its state; to M+ and
    MemoryLLM what is told and said is injected, and they answer from their memory.

    Args:
        model: the model.
        text: its tokenizer, chat template, and how it ends a text.
        memory: where the memory lies, which goes on if there is one; None keeps it in
            this object alone.
        name: of the model, for errors.
        origin: what the model was made from.
        template: whether to ask by its chat template, where it has one. Without, a
            question is "Question: ...", and an answer one paragraph.

    Raises:
        ValueError: without a tokenizer or with that of another model; on a chat
            template that cannot be used; on a memory of another model, or one that is
            damaged.
    """

    def __init__(
        self,
        model: Model,
        text: TextInterface,
        memory: MemoryFolder | None = None,
        *,
        name: str = "",
        origin: str = "",
        template: bool = True,
    ):
        owner = owner_of(model, text, name, origin)
        assert text.tokenizer is not None
        self.model, self.memory = model, memory
        self._tokenizer, self._generation = text.tokenizer, text.generation
        self._form = choose_format(text, template)
        self._ends = stop_tokens(text, self._form)
        self._backend = backend_of(model)
        found = (
            memory.load(lambda folder: self._load(folder, owner)) if memory else None
        )
        if found is None:
            found = Record(owner), model.init_state(1, 1)
        self.record, self._state = found

    @classmethod
    def open(
        cls,
        model: Path | str,
        memory: Path | str | None = None,
        *,
        dtype: Dtype | None = None,
        template: bool = True,
    ) -> "Conversation":
        """Opens a model by its name, and its memory, which this process alone writes.

        Args:
            model: folder of a run, folder of safetensors, GGUF file, or a model of the
                hub; see `memjax.load`.
            memory: folder; see `MemoryFolder`.
            dtype: of the activations of a model without a run; None is float32.
            template: as for the class.

        Raises:
            LockedError: another process writes there.
            ValueError: as `memjax.load`, `MemoryFolder` and the class.
        """
        folder = None if memory is None else MemoryFolder(memory)
        try:
            return cls._opened(model, folder, dtype, template, writes=True)
        except BaseException:
            if folder is not None:
                folder.close()
            raise

    @classmethod
    def look(
        cls,
        model: Path | str,
        memory: Path | str,
        *,
        dtype: Dtype | None = None,
        template: bool = True,
    ) -> "Conversation":
        """As `open`, to `query` alone: while another process writes there, too.

        Raises:
            ValueError: as `open`, or if no memory lies there.
        """
        folder = MemoryFolder(memory)
        if folder.newest() is None:
            raise ValueError(f"memory={str(memory)!r} holds no memory")
        found = cls._opened(model, folder, dtype, template, writes=False)
        # Nothing is written there from now on.
        found.memory = None
        return found

    @classmethod
    def _opened(cls, model, folder, dtype, template, writes):
        # Another writer, or a damaged record, is refused before a model is read.
        if folder is not None:
            if writes and folder.path.exists():
                folder.lock()
            folder.load(read_note)
        opened = memjax.load(model, dtype=dtype)
        # A new folder is made when there is a model for it.
        if folder is not None and writes:
            folder.lock()
        return cls(
            opened.model,
            opened.text,
            folder,
            name=str(model),
            origin=opened.origin,
            template=template,
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What was told and said so far."""
        return self.record.entries

    @property
    def tokens(self) -> int:
        """How many tokens the memory has read."""
        return self.record.tokens

    @property
    def state(self) -> PyTree:
        """The memory, as the model has it."""
        return self._state

    def inject(
        self,
        text: str,
        *,
        name: str = "",
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> int:
        """Reads a text into the memory, and saves it.

        Args:
            text: of any length that the model can hold; not empty.
            name: under which `entries` has it.
            progress: called with the tokens read so far and their number.

        Returns:
            How many tokens were read.

        Raises:
            ValueError: on an empty text, or one that full attention has no room for.
            OSError: it could not be saved; the saved memory is untouched.
        """
        if not text.strip():
            raise ValueError(f"text must not be empty, got {name or repr(text)}")
        tokens = self._encode(text if not self.tokens else f"\n\n{text}")
        self._require_room(len(tokens), name or "the text")
        shows = lambda done: progress(done, len(tokens))
        state = self._backend.read(self._state, tokens, shows)
        entry = Entry("text", name, len(tokens))
        self._keep(state, (entry,), ())
        return len(tokens)

    def query(
        self,
        question: str,
        *,
        begin: str = "",
        limit: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        write: Callable[[str], object] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Answers from the memory, which stays as it is.

        Args:
            question: not empty.
            begin: words that the answer begins with, which are read before it is drawn:
                a model that has learned to complete sentences answers better.
            limit: most tokens of the answer; fewer where full attention has no more
                room.
            sampling: how to draw; None is as the model's makers do, or else greedy.
            seed: of the draws.
            write: called with each new part of the answer.
            interrupted: asked after each token; True ends the answer.

        Raises:
            ValueError: on an empty question, one that the state has no room for, or a
                size below 1.
        """
        options = (limit, sampling, seed, write, interrupted)
        return self._turn(question, begin, *options)[0]

    def chat(
        self,
        message: str,
        *,
        limit: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        write: Callable[[str], object] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Answers, remembers both, and saves the memory; see `query`.

        If it raises, the conversation is where it was before.
        """
        answer, before, after, said, closing = self._turn(
            message, "", limit, sampling, seed, write, interrupted
        )
        state, pending = self._backend.remember(self._state, after, said, closing)
        read = len(said) - answer.tokens
        # What is injected at once is no part of the next prompt.
        told = answer.tokens + len(closing) - len(pending)
        entries = (
            Entry("user", before, read),
            Entry("assistant", answer.text, told, answer.ended),
        )
        self._keep(state, entries, pending)
        return answer

    def close(self) -> None:
        """Lets other processes write the memory."""
        if self.memory is not None:
            self.memory.close()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _turn(self, message, begin, limit, sampling, seed, write, interrupted):
        """An answer, and what `chat` keeps of it."""
        if not message.strip():
            raise ValueError(f"the question must not be empty, got {message!r}")
        check_sizes(limit=limit)
        check_seed(seed)
        tokenizer, form = self._tokenizer, self._form
        prompt = self._prompt(message, begin)
        self._require_room(len(prompt) + 1, "the question")
        room = self.model.remaining(self._state)
        limit = limit if room is None else min(limit, room - len(prompt))
        parts: list[str] = []

        def keep(part: str) -> None:
            parts.append(part)
            if write is not None:
                write(part)

        if begin:
            keep(begin)

        def decode(row: np.ndarray) -> str:
            # Vocabularies are padded with tokens that no tokenizer has.
            text = tokenizer.decode(row[row < tokenizer.vocab_size])
            # White space before an answer is no paragraph.
            return text if begin else text.lstrip()

        shows = printer(decode, form.stop, limit, self._ends, keep)
        over = False

        def stop_when(tokens: np.ndarray) -> bool:
            nonlocal over
            over = shows(tokens) or int(tokens[0, -1]) in self._ends
            return over or interrupted()

        key = jax.random.fold_in(jax.random.key(seed), self.tokens)
        sampling = sampling or makers_sampling(self._generation)
        draws = Decoding(limit, key, sampling, self._ends, stop_when)
        after, drawn = self._backend.answer(self._state, prompt, draws)
        answer = Answer("".join(parts).rstrip(), len(drawn), over)
        closing = closing_tokens(tokenizer, form, drawn)
        return answer, message, after, np.concatenate([prompt, drawn]), closing

    def _prompt(self, message: str, begin: str) -> Int[np.ndarray, " T"]:
        if self.record.turns:
            prompt = self._form.next(message)
        else:
            prompt = self._form.first(message, not self.tokens)
        # Tokens of words have the space before them.
        space = " " if begin and not prompt[-1:].isspace() else ""
        return self._encode(f"{prompt}{space}{begin.rstrip()}")

    def _encode(self, text: str) -> Int[np.ndarray, " T"]:
        """A text's tokens, behind what is yet to be read."""
        # Only a memory without tokens gets those that begin a text.
        encode = self._tokenizer.encode
        if self.tokens:
            tokens = np.concatenate(
                [np.asarray(self.record.pending, np.int32), encode(text)]
            )
        else:
            tokens = encode_prompt(self._tokenizer, text)
        if len(tokens) < 2:
            raise ValueError(
                f"a text must have at least 2 tokens, got {len(tokens)} of {text!r}"
            )
        return tokens.astype(np.int32)

    def _require_room(self, count: int, what: str) -> None:
        room = self.model.remaining(self._state)
        if room is not None and count > room:
            raise ValueError(
                f"{what} makes {count:,} tokens to read; the memory holds "
                f"{self.tokens:,}, and full attention has room for {room:,} more"
            )

    def _keep(self, state, entries, pending):
        """Saves the memory, and goes on from it."""
        record = Record(
            self.record.owner, (*self.entries, *entries), tuple(map(int, pending))
        )
        if self.memory is not None:
            note = to_record(record)
            write = lambda path: save_memory(path, self.model, state, note=note)
            self.memory.save(write)
        self.record, self._state = record, state

    def _load(self, folder, owner):
        """Record and state of a saved memory."""
        note = read_note(folder)
        record = parse_record(note, str(folder), self.model.vocab_size)
        record.owner.require(owner, str(folder.parent))
        return record, load_memory(folder, self.model)


def makers_sampling(generation: GenerationConfig) -> Sampling:
    """How a model's makers draw from it; greedy where they do not say."""
    if generation.temperature is None:
        return Sampling(temperature=0.0)
    return Sampling(
        generation.temperature, generation.top_k or 0, generation.top_p or 1.0
    )
