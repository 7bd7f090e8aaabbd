"""Tokenizers: bytes, the shipped 4,096-entry BPE, or any `tokenizers` JSON.

A tokenizer file is JSON, read by the `tokenizers` library: no code is run.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import logging
import lzma
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import huggingface_hub
import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

from memjax.buckets.bucket import as_path
from memjax.checks import SHOWN_CHARACTERS, short
from memjax.config_io import parse_json, read_bounded

logger = logging.getLogger(__name__)

SHIPPED_FILE = "bpe4k.json.xz"
PANIC = "PanicException"
#: Reads a tokenizer, and encodes the characters of Unicode's first plane.
TRIAL = """import sys, tokenizers
made = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
for start in (*range(1, 0xD800, 0x400), *range(0xE000, 0x10000, 0x400)):
    made.encode(" ".join(map(chr, range(start, start + 0x3FF))))
"""
TRIAL_SECONDS = 120
#: Factor by which a normalizer may lengthen a text.
MAX_GROWTH = 1000
HUB_FILE = "tokenizer.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


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
    """A `tokenizers` tokenizer; adds no special tokens, cuts and pads nothing.

    Attributes:
        vocab_size: every id is in [0, vocab_size).
        digest: SHA-256 of `serialised`.
        serialised: content of its `tokenizer.json`.
        backend: the library's tokenizer.
    """

    vocab_size: int
    digest: str
    serialised: bytes = dataclasses.field(repr=False, compare=False)
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Returns the ids of `text`.

        Raises:
            ValueError: lone surrogates, or a text that the tokenizer cannot encode, for
                lack of an unknown token in its vocabulary.
        """
        text.encode("utf-8")
        with _library_errors("the tokenizer cannot encode a text"):
            encoded = self.backend.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32)

    def decode(self, ids: Integer[np.ndarray, " T"]) -> str:
        """Returns the text, special tokens included."""
        _check_ids(ids, self.vocab_size)
        with _library_errors("the tokenizer cannot decode"):
            return self.backend.decode(ids.tolist(), skip_special_tokens=False)


def encode_prompt(tokenizer: Tokenizer, text: str) -> Int32[np.ndarray, " T"]:
    """The ids of a text, after `first_tokens`.

    Of prompts, and of documents that are trained on or scored. Tokens at the end of a
    text are left out: the text continues.
    """
    ids = tokenizer.encode(text)
    first = np.asarray(first_tokens(tokenizer), np.int32)
    # A chat template writes the first token itself.
    given = len(ids) >= len(first) and np.array_equal(ids[: len(first)], first)
    return ids if given else np.concatenate([first, ids])


def first_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer puts before every text; () for many.

    Llama 2 and 3, Gemma, Mistral and OPT begin every text with a token of their own,
    and continue a text badly without it.
    """
    return _added(tokenizer) if isinstance(tokenizer, JsonTokenizer) else ()


@functools.lru_cache(maxsize=8)
def _added(tokenizer: JsonTokenizer) -> tuple[int, ...]:
    """The ids before those of a text."""
    # A text between the added tokens; small vocabularies lack most letters.
    for text in ("a", *tokenizer.backend.get_vocab(with_added_tokens=False)):
        with _library_errors("the tokenizer cannot encode a text"):
            whole = tokenizer.backend.encode(text)
        # It marks the added tokens, front and back.
        mask = whole.special_tokens_mask
        if 0 in mask:
            return tuple(whole.ids[: mask.index(0)])
    return ()


def load_tokenizer(name: str) -> Tokenizer:
    """Returns a tokenizer.

    Args:
        name: "bytes" (256 ids), "bpe4k" (4,096 ids, trained on the train split of the
            embedded corpus only), the path of a `tokenizers` JSON file or of a folder
            with a `tokenizer.json`, or a repository of the Hugging Face hub that has
            one, "owner/name" or "owner/name@revision".

    Raises:
        ValueError: `name` is none of these, the hub does not give it, or the file is
            not a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe4k":
        shipped = resources.files("memjax.data") / "corpus" / SHIPPED_FILE
        return parse_tokenizer(lzma.decompress(shipped.read_bytes()), name)
    path = as_path(name)
    if path.is_dir() and (path / HUB_FILE).is_file():
        path = path / HUB_FILE
    if path.is_file():
        return parse_tokenizer(read_bounded(path), name)
    # The path of a missing file is not a repository.
    if _HUB_ID.fullmatch(name) and not name.endswith(".json") and not path.exists():
        return parse_tokenizer(read_bounded(_download(name)), name)
    near = difflib.get_close_matches(name, ("bytes", "bpe4k"), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f'tokenizer={short(name)} is neither "bytes", "bpe4k", the path of a '
        f"tokenizers JSON file nor a repository of the Hugging Face hub{hint}"
    )


def _download(name: str) -> Path:
    """The tokenizer of a repository of the hub, from its cache if there is no network.

    Raises:
        ValueError: saying where it was looked for.
    """
    repository, _, revision = name.partition("@")
    # It logs every attempt; the error below says it once.
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        file = huggingface_hub.hf_hub_download(
            repository, HUB_FILE, revision=revision or None
        )
    # Also for no network, no repository, no revision, no permission and a bad name.
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        places = huggingface_hub.constants
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"tokenizer={name!r} was not found: no such path, not in the cache "
            f"{places.HF_HUB_CACHE}, and not to be had from {places.ENDPOINT}: "
            f"{reason[0][:200]}"
        ) from error
    finally:
        log.setLevel(before)
    return Path(file)


def parse_tokenizer(serialised: bytes, name: str) -> JsonTokenizer:
    """Returns the tokenizer that `serialised` (JSON) describes.

    Raises:
        ValueError: not a tokenizer; the message calls it `name`.
    """
    with _library_errors(f"tokenizer={name!r} is not a tokenizers JSON file"):
        content = parse_json(serialised, "it is")
        for part in ("normalizer", "decoder"):
            _check_growth(content, part)
        if b'"Precompiled"' in serialised:
            _try_elsewhere(serialised)
        backend = tokenizers.Tokenizer.from_str(serialised.decode("utf-8"))
    # Truncation and padding of a file would lose or add tokens.
    backend.no_truncation()
    backend.no_padding()
    model: Any = backend.model
    if dropout := getattr(model, "dropout", None):
        # One text would have other tokens each time.
        model.dropout = None
        logger.warning(
            "%s: a dropout of %s is for training, and left out", name, dropout
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"tokenizer={name!r} has an empty vocabulary")
    return JsonTokenizer(
        vocab_size=max(vocabulary.values()) + 1,
        digest=hashlib.sha256(serialised).hexdigest(),
        serialised=serialised,
        backend=backend,
    )


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Errors of the library become a ValueError that begins with `what`."""
    try:
        yield
    # The library raises bare Exception, and a BaseException for a panic in Rust.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise ValueError(f"{what}: {str(error)[:SHOWN_CHARACTERS]}") from error


def _try_elsewhere(serialised: bytes) -> None:
    """Raises ValueError if parsing and encoding end a process.

    A damaged map of SentencePiece's normalizer, which is binary, can abort it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL],
            input=serialised,
            capture_output=True,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"it takes more than {TRIAL_SECONDS} seconds") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"it ends with {done.returncode}")


def _check_growth(content: Any, part: str) -> None:
    """Raises ValueError on replacements that lengthen a text a thousand times or more.

    A few in a row fill the memory, and the library then aborts the process. `part` is
    the key of the steps, such as "normalizer".
    """
    growth = 1.0
    pending = [content.get(part) if isinstance(content, dict) else None]
    while pending:
        found = pending.pop()
        if not isinstance(found, dict):
            continue
        parts = found.get(f"{part}s")
        pending += parts if isinstance(parts, list) else []
        if found.get("type") == "Replace":
            pattern = found.get("pattern")
            old = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match single characters.
            size = len(old) if isinstance(old, str) and old else 1
            growth *= max(1.0, len(str(found.get("content", ""))) / size)
    if growth > MAX_GROWTH:
        raise ValueError(
            f"its replacements make a text up to {growth:.3g} times as long, of at "
            f"most {MAX_GROWTH}"
        )


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"ids range from {ids.min()} to {ids.max()}; "
            f"this tokenizer knows [0, {vocab_size})"
        )
