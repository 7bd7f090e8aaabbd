"""The record of a saved memory: its model, texts and turns."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

from jaxtyping import PyTree

from memjax.checks import short
from memjax.config_io import from_record
from memjax.data import Tokenizer
from memjax.models.base import Model
from memjax.models.checkpoints.memory_state import load_memory, read_note
from memjax.models.checkpoints.text_interface import TextInterface


@dataclasses.dataclass(frozen=True)
class Entry:
    """A text or a turn.

    Attributes:
        role: "text" is an injected text; the others are turns.
        text: of the turn; of an injected text only its name.
        tokens: number that the memory has read, with those of the prompt format.
        ended: whether the model ended its answer, before its limit or an interruption.
        digest: sha256 of an injected text, to notice that it is injected again.
    """

    role: Literal["text", "user", "assistant"]
    text: str
    tokens: int
    ended: bool = True
    digest: str = ""

    def __post_init__(self):
        # Records are read from folders that are not trusted.
        if not 0 <= self.tokens < 2**53:
            raise ValueError(f"tokens must be in [0, 2**53), got {short(self.tokens)}")


@dataclasses.dataclass(frozen=True)
class Record:
    """Record of a saved memory, next to its state.

    Attributes:
        model: the name that its model was loaded by.
        origin: source of the model; see `memjax.Loaded`.
        entries: texts and turns, in order.
        pending: text that is read with the next text or prompt, such as what closes an
            answer that was cut off.
        system: message before the first question; "" for the template's own.
    """

    model: str
    origin: str
    entries: tuple[Entry, ...] = ()
    pending: str = ""
    system: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens that the memory has read."""
        return sum(entry.tokens for entry in self.entries)

    @property
    def turns(self) -> int:
        """Number of answers."""
        return sum(entry.role == "assistant" for entry in self.entries)

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        """Questions and answers, in order."""
        asked = [entry.text for entry in self.entries if entry.role == "user"]
        said = [entry.text for entry in self.entries if entry.role == "assistant"]
        return list(zip(asked, said, strict=False))

    @property
    def spoken(self) -> str:
        """The texts of all turns."""
        return "\n\n".join(text for turn in self.exchanges for text in turn)

    def name_of(self, text: str) -> str | None:
        """The name of the entry that injected this text before; None without one."""
        found = text_digest(text)
        return next((e.text for e in self.entries if e.digest == found), None)


def text_digest(text: str) -> str:
    """The sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_of(model: Model, text: TextInterface, name: str) -> Tokenizer:
    """Raises ValueError without a tokenizer, or if it is that of another model."""
    tokenizer = text.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{name or 'the model'} has no tokenizer: put its tokenizer.json beside it"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {name or 'the model'} has ids up to "
            f"{tokenizer.vocab_size - 1}, the model a vocabulary of "
            f"{model.vocab_size}: they are of different models"
        )
    return tokenizer


def load_saved(
    folder: Path, model: Model, tokenizer: Tokenizer, name: str
) -> tuple[Record, PyTree]:
    """Record and state of a saved memory, for the model of this name.

    Raises:
        ValueError: it is damaged, or of other weights or another tokenizer. OSError: it
            cannot be read.
    """
    record: Record = from_record(Record, read_note(folder), f"{folder}: note")
    try:
        return record, load_memory(folder, model, tokenizer=tokenizer)
    except ValueError as error:
        if record.model == name:
            raise
        raise ValueError(
            f"{error}; it is the memory of {record.model!r}, and not of {name!r}"
        ) from error
