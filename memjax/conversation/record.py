"""The record of a saved memory: its model, texts and turns."""

import dataclasses
import hashlib
from typing import Literal

import jax
import numpy as np
from flax import nnx

from memjax.checks import short
from memjax.models.base import Model
from memjax.models.checkpoints.text_interface import TextInterface

#: Numbers of each parameter in a fingerprint.
SAMPLED = 4096


@dataclasses.dataclass(frozen=True)
class Owner:
    """The model that a memory belongs to.

    Attributes:
        name: the name it was loaded by.
        origin: its source; see `memjax.Loaded`.
        fingerprint: of its parameters; see `fingerprint`.
        tokenizer: digest of its tokenizer.
    """

    name: str
    origin: str
    fingerprint: str
    tokenizer: str

    def require(self, other: "Owner", where: str) -> None:
        """Raises ValueError unless `other`, which was loaded, is this model."""
        both = f"{self.name!r}, and not of {other.name!r}"
        if self.fingerprint != other.fingerprint:
            hint = "; has the model been trained further since?"
            raise ValueError(
                f"{where} is the memory of {both}: the fingerprints of their "
                f"parameters are {self.fingerprint[:12]} and {other.fingerprint[:12]}"
                + (hint if self.name == other.name else "")
            )
        if self.tokenizer != other.tokenizer:
            raise ValueError(
                f"{where} is the memory of {both}: their tokenizers differ"
            )


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
        owner: the model.
        entries: texts and turns, in order.
        pending: text that is read with the next text or prompt, such as what closes an
            answer that was cut off.
        system: message before the first question; "" for the template's own.
    """

    owner: Owner
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


def owner_of(model: Model, text: TextInterface, name: str, origin: str) -> Owner:
    """The `Owner` of a memory of this model.

    Raises:
        ValueError: without a tokenizer, or if it is that of another model.
    """
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
    return Owner(name, origin, fingerprint(model), tokenizer.digest)


def fingerprint(model: Model) -> str:
    """The sha256 of names, types, shapes and evenly spaced numbers of all parameters.

    Training changes most numbers, so that a sample is enough: a model of 16 GB is not
    read in full for each question.
    """
    found = hashlib.sha256()
    variables = nnx.to_pure_dict(nnx.state(model))
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        value = np.asarray(leaf)
        kind = f"{jax.tree_util.keystr(path)} {value.dtype}{value.shape}"
        found.update(kind.encode())
        flat = value.reshape(-1)
        found.update(flat[:: max(1, flat.size // SAMPLED)].tobytes())
    return found.hexdigest()
