"""Tokenizers: bytes, the shipped 4,096-entry BPE, or any `tokenizers` JSON.

Reading a tokenizer file runs no code: it is JSON, read by the `tokenizers` library.
"""

import dataclasses
import difflib
import hashlib
import lzma
from importlib import resources
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

SHIPPED_FILE = "bpe4k.json.xz"


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: every id is in [0, vocab_size).
        digest: hexadecimal; two tokenizers with one digest encode alike.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def encode(self, text: str) -> Int32[np.ndarray, " T"]: ...

    def decode(self, ids: Integer[np.ndarray, " T"]) -> str: ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One id per byte of UTF-8."""

    vocab_size: int = 256
    digest: str = "utf-8-bytes"

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Returns the bytes of `text`. Raises ValueError for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Integer[np.ndarray, " T"]) -> str:
        """Returns the text; a cut character becomes U+FFFD."""
        _check_ids(ids, self.vocab_size)
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class JsonTokenizer:
    """A `tokenizers` tokenizer; adds no special tokens, cuts and pads nothing."""

    vocab_size: int
    digest: str
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Returns the ids of `text`. Raises ValueError for lone surrogates."""
        text.encode("utf-8")
        return np.asarray(
            self.backend.encode(text, add_special_tokens=False).ids, np.int32
        )

    def decode(self, ids: Integer[np.ndarray, " T"]) -> str:
        """Returns the text, special tokens included."""
        _check_ids(ids, self.vocab_size)
        return self.backend.decode(ids.tolist(), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """Returns a tokenizer.

    Args:
        name: "bytes" (256 ids), "bpe4k" (4,096 ids, trained on the train split of the
          embedded corpus only), or the path of a `tokenizers` JSON file.

    Raises:
        ValueError: `name` is none of these, or the file is not a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe4k":
        shipped = resources.files("memjax.data") / "corpus" / SHIPPED_FILE
        return parse_tokenizer(lzma.decompress(shipped.read_bytes()), name)
    path = Path(name).expanduser()
    if path.is_file():
        return parse_tokenizer(path.read_bytes(), name)
    near = difflib.get_close_matches(name, ("bytes", "bpe4k"), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f'tokenizer={name!r} is neither "bytes", "bpe4k" nor the path of a '
        f"tokenizers JSON file{hint}"
    )


def parse_tokenizer(serialised: bytes, name: str) -> JsonTokenizer:
    """Returns the tokenizer that `serialised` (JSON) describes.

    Raises:
        ValueError: not a tokenizer; `name` is what the message calls it.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(serialised.decode("utf-8"))
    # The library raises bare Exception for malformed JSON.
    except Exception as error:
        raise ValueError(
            f"tokenizer={name!r} is not a tokenizers JSON file: {error}"
        ) from error
    # A file may ask for truncation or padding, which would lose or invent tokens.
    backend.no_truncation()
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"tokenizer={name!r} has an empty vocabulary")
    return JsonTokenizer(
        vocab_size=max(vocabulary.values()) + 1,
        digest=hashlib.sha256(serialised).hexdigest(),
        backend=backend,
    )


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"ids range from {ids.min()} to {ids.max()}; "
            f"this tokenizer knows [0, {vocab_size})"
        )
