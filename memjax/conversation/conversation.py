"""A conversation with a model and its lasting memory.

Shapes: T tokens of a text or a question.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

import memjax
from memjax.checks import check_seed, check_sizes
from memjax.config_io import to_record
from memjax.conversation.answer import Answer, makers_sampling
from memjax.conversation.backends import Decoding, backend_of
from memjax.conversation.memory_folder import MemoryFolder
from memjax.conversation.prompt_format import (
    choose_format,
    encode_part,
    stop_tokens,
    unread_closing,
)
from memjax.conversation.record import (
    Entry,
    Record,
    load_saved,
    text_digest,
    tokenizer_of,
)
from memjax.conversation.streaming import answer_decoder, printer
from memjax.data.documents.pieces import SEPARATOR, encode_after, unsettled
from memjax.models import Sampling
from memjax.models.base import Model
from memjax.models.checkpoints.memory_state import read_note, save_memory
from memjax.models.checkpoints.pretrained import Progress, unseen
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.language_model.config import Dtype


class Conversation:
    """Injects texts into a model's memory, queries it, and chats with it.

    Any model of the library: most read text and questions into their state; into M+
    and MemoryLLM both are injected, and they answer from their memory.

    Args:
        model: the model.
        text: its tokenizer, chat template, and the tokens that end a text.
        memory: folder of the memory, continued if it has one; None stores it in this
            object alone.
        name: of the model, for errors.
        origin: source of the model; see `memjax.Loaded`.
        template: whether to format questions by its chat template, where it has one.
            Without, a question is "Question: ...", and an answer one paragraph.

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
        self.tokenizer = tokenizer_of(model, text, name)
        self.model, self.memory, self.generation = model, memory, text.generation
        self._format = choose_format(text, template)
        self._ends = stop_tokens(text, self._format)
        self._backend = backend_of(model)
        of = (model, self.tokenizer, name)
        found = memory and memory.load(lambda path: load_saved(path, *of))
        if found is None:
            found = Record(name, origin), model.init_state(1, 1)
        self.record, self._state = found
        # One turn back: a cache of full attention may be large.
        self._before: tuple[Record, PyTree] | None = None

    @classmethod
    def open(
        cls,
        model: Path | str,
        memory: Path | str | None = None,
        *,
        dtype: Dtype | None = None,
        template: bool = True,
        progress: Progress = unseen,
    ) -> "Conversation":
        """Opens a model by its name, and its memory, locked for this process.

        Args:
            model: see `memjax.load`.
            memory: see `MemoryFolder`.
            dtype: of the activations of a model without a run; None is float32.
            template: as for the class.
            progress: as for `memjax.load`.

        Raises:
            LockedError: another process writes there.
            ValueError: as `memjax.load`, `MemoryFolder` and the class.
        """
        folder = None if memory is None else MemoryFolder(memory)
        try:
            return cls._opened(model, folder, dtype, template, progress, writes=True)
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
        progress: Progress = unseen,
    ) -> "Conversation":
        """Opens a memory read-only, for `query`; another process may write it.

        Raises:
            ValueError: as `open`, or if the folder has no memory.
        """
        folder = MemoryFolder(memory)
        if folder.newest() is None:
            raise ValueError(f"memory={str(memory)!r} holds no memory")
        found = cls._opened(model, folder, dtype, template, progress, writes=False)
        # Read-only from now on.
        found.memory = None
        return found

    @classmethod
    def _opened(cls, model, folder, dtype, template, progress, *, writes):
        # Another writer, or a damaged record, is refused before a model is read.
        if folder is not None:
            if writes and folder.path.exists():
                folder.lock()
            folder.load(read_note)
        opened = memjax.load(model, dtype=dtype, for_generation=True, progress=progress)
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
        """Texts and turns so far."""
        return self.record.entries

    @property
    def tokens(self) -> int:
        """Number of tokens that the memory has read."""
        return self.record.tokens

    @property
    def state(self) -> PyTree:
        """State of the model."""
        return self._state

    @property
    def room(self) -> int | None:
        """Number of tokens that full attention has room for; None without it."""
        return self.model.remaining(self._state)

    @property
    def lost(self) -> int:
        """Number of the first tokens that have left the state: see `Model.reach`."""
        return max(0, self.tokens - (self.model.reach or self.tokens))

    def set_system(self, text: str) -> None:
        """Sets the system message, "" for the template's own; saved with the next turn.

        Raises ValueError after the first answer, or on a template without one.
        """
        if self.record.turns:
            raise ValueError("the system message comes before the first question")
        if text not in self._format.prompt("", system=text):
            raise ValueError("the chat template leaves out the system message")
        self.record = replace(self.record, system=text)

    def undo(self) -> None:
        """Restores and saves the memory before the last text, turn or `forget`."""
        if self._before is None:
            raise ValueError("undo takes back only the last change since the start")
        self._save(*self._before)
        self._before = None

    def forget(self) -> None:
        """Empties the memory, and saves it."""
        record = Record(self.record.model, self.record.origin)
        self._commit(self.model.init_state(1, 1), record)

    def inject(
        self,
        text: str,
        *,
        name: str = "",
        progress: Progress = unseen,
    ) -> int:
        """Reads a text into the memory, and saves the memory.

        Args:
            text: of any length that the model can hold; not empty.
            name: of its entry in `entries`.
            progress: called with the tokens read so far and their number.

        Returns:
            Number of tokens read. Of the last one, such as a full stop, the next text
            or question may make another: it is read with that.

        Raises:
            ValueError: on an empty text, or one that full attention has no room for.
            OSError: it could not be saved; the saved memory is untouched.
        """
        if not text.strip():
            raise ValueError(f"text must not be empty, got {name or repr(text)}")
        whole = f"{SEPARATOR}{text}" if self.tokens else text
        pending = unsettled(self.tokenizer, whole)
        tokens = self._encode(whole.removesuffix(pending))
        self._require_room(len(tokens), name or "the text")
        state = self._backend.read(
            self._state, tokens, lambda done: progress(done, len(tokens))
        )
        entry = Entry("text", name, len(tokens), digest=text_digest(text))
        self._extend(state, (entry,), pending)
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
        progress: Progress = unseen,
    ) -> Answer:
        """Answers from the memory without changing it.

        Args:
            question: not empty.
            begin: first words of the answer: a base model, trained to complete text,
                answers better with them.
            limit: maximum tokens of the answer; fewer where full attention has no more
                room.
            sampling: None is the makers' sampling, or else `answer.CHAT`.
            seed: of the sampling.
            write: called with each new part of the answer.
            interrupted: called after each token; True ends the answer.
            progress: as of `inject`, for the prompt, which M+ reads at once.

        Raises:
            ValueError: on an empty question, one that the state has no room for, or a
                size below 1.
        """
        more = (write, interrupted, progress)
        return self._turn(question, begin, limit, sampling, seed, *more)[0]

    def chat(
        self,
        message: str,
        *,
        limit: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        write: Callable[[str], object] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        progress: Progress = unseen,
    ) -> Answer:
        """Answers, adds question and answer to the memory, and saves it; see `query`.

        If it raises, the conversation is unchanged.
        """
        answer, after, said, pending = self._turn(
            message, "", limit, sampling, seed, write, interrupted, progress
        )
        prompt, read = len(said) - answer.tokens, answer.tokens
        closing = encode_after(self.tokenizer, pending) if pending else said[:0]
        state, closed = self._backend.remember(self._state, after, said, closing)
        if closed:
            # It is no part of the next prompt.
            read, pending = read + len(closing), ""
        entries = (
            Entry("user", message, prompt),
            Entry("assistant", answer.text, read, answer.ended),
        )
        self._extend(state, entries, pending)
        return answer

    def close(self) -> None:
        """Unlocks the memory for other processes."""
        if self.memory is not None:
            self.memory.close()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(
        self, message, begin, limit, sampling, seed, write, interrupted, progress
    ):
        """The answer, the state after it, the turn's tokens, and text still to read."""
        if not message.strip():
            raise ValueError(f"the question must not be empty, got {message!r}")
        check_sizes(limit=limit)
        check_seed(seed)
        tokenizer, prompt = self.tokenizer, self._prompt(message, begin)
        self._require_room(len(prompt) + 1, "the question")
        if self.room is not None:
            limit = min(limit, self.room - len(prompt))
        parts: list[str] = []

        def emit(part: str) -> None:
            parts.append(part)
            if write is not None:
                write(part)

        if begin:
            emit(begin)
        decode = answer_decoder(tokenizer, prompt, begin)
        shown = printer(decode, self._format.stop, limit, self._ends, emit)
        ended = False

        def stop_when(tokens: np.ndarray) -> bool:
            nonlocal ended
            ended = shown(tokens) or int(tokens[0, -1]) in self._ends
            return ended or interrupted()

        key = jax.random.fold_in(jax.random.key(seed), self.tokens)
        sampling = sampling or makers_sampling(self.generation)
        # Of a memory the turns; what texts say is no repetition.
        spoken, size = self.record.spoken, tokenizer.vocab_size
        spoken = encode_after(tokenizer, spoken).tolist()
        decoding = Decoding(limit, key, sampling, spoken, size, self._ends, stop_when)
        after, drawn = self._backend.answer(self._state, prompt, decoding, progress)
        ids, scores = drawn.tokens, tuple(drawn.log_probs.tolist())
        text = "".join(parts).rstrip()
        answer = Answer(text, len(ids), ended, tuple(ids.tolist()), scores)
        closing = unread_closing(tokenizer, self._format, int(ids[-1]))
        return answer, after, np.concatenate([prompt, ids]), closing

    def _prompt(self, message: str, begin: str) -> Int[np.ndarray, " T"]:
        turns, system = self.record.exchanges, self.record.system
        prompt = self._format.prompt(message, turns, not self.tokens, system)
        # A word's token begins with the space before it.
        space = " " if begin and not prompt[-1:].isspace() else ""
        text = f"{prompt}{space}{begin.rstrip()}"
        return self._encode(text, self._format.begins_itself)

    def _encode(self, text: str, begins: bool = False) -> Int[np.ndarray, " T"]:
        """A text's tokens, after the pending text."""
        before = self.record.pending if self.tokens else None
        return encode_part(self.tokenizer, text, before, begins)

    def _require_room(self, count: int, what: str) -> None:
        if (room := self.room) is not None and count > room:
            raise ValueError(
                f"{what} makes {count:,} tokens to read; the memory holds "
                f"{self.tokens:,}, and full attention has room for {room:,} more"
            )

    def _extend(self, state, entries, pending):
        """Saves the memory with further entries, and continues from it."""
        entries = (*self.entries, *entries)
        self._commit(state, replace(self.record, entries=entries, pending=pending))

    def _commit(self, state, record):
        """Saves a memory, and continues from it; `undo` returns to the one before."""
        before = (self.record, self._state)
        self._save(record, state)
        self._before = before

    def _save(self, record, state):
        if self.memory is not None:
            about: Any = {"note": to_record(record), "tokenizer": self.tokenizer}
            self.memory.save(lambda path: save_memory(path, self.model, state, **about))
        self.record, self._state = record, state
