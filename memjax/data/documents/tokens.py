"""Documents as tokens: tokenised once, kept on disk, memory-mapped."""

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.data.documents import sources
from memjax.data.documents.documents import SPLITS, Document, Split
from memjax.data.documents.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


class TokenisedDocument(NamedTuple):
    """One document as ids.

    Attributes:
        name: as in `Document`.
        kind: as in `Document`.
        tokens: [T], at least one, memory-mapped read-only from the cache.
    """

    name: str
    kind: str
    tokens: Int32[np.ndarray, " T"]


def load_tokens(
    spec: str,
    tokenizer: Tokenizer,
    split: Split,
    cache_dir: Path | None = None,
) -> list[TokenisedDocument]:
    """Returns the documents of one split, tokenised once and cached for good.

    A cached file is named after the text and the tokenizer, is checked against its
    digest whenever it is opened, and is built anew (with a line in the log) if it is
    damaged. Several processes may share a cache.

    Args:
        spec: a source, as for `open_documents`.
        tokenizer: see `load_tokenizer`.
        split: "train", "validation" or "test".
        cache_dir: None means `$XDG_CACHE_HOME/memjax`, or `~/.cache/memjax`.

    Raises:
        ValueError: unknown split, no document in it, or a source that cannot be read.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {', '.join(SPLITS)}")
    folder = (default_cache_dir() if cache_dir is None else cache_dir) / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    documents = [
        _cached(document, tokenizer, folder)
        for document in sources.iterate_documents(spec, split)
    ]
    if not documents:
        raise ValueError(
            f"source={spec!r} has no document in split={split!r}; a source without "
            "splits of its own needs two documents of a kind for validation, three "
            "for test"
        )
    return documents


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/memjax`, or `~/.cache/memjax` if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "memjax"


def _cached(
    document: Document, tokenizer: Tokenizer, folder: Path
) -> TokenisedDocument:
    key = hashlib.sha256(document.text.encode("utf-8"))
    # A separator, so that text and digest cannot run together.
    key.update(b"\0" + tokenizer.digest.encode("utf-8"))
    file = folder / f"{key.hexdigest()}.npy"
    tokens = _open(file)
    if tokens is None:
        # Read back through the same checks, and memory-mapped as a cached file is.
        _write(file, _tokenise(document, tokenizer))
        tokens = _open(file)
    if tokens is None:
        raise OSError(f"{file} does not read back as it was written")
    return TokenisedDocument(document.name, document.kind, tokens)


def _tokenise(document: Document, tokenizer: Tokenizer) -> Int32[np.ndarray, " T"]:
    tokens = tokenizer.encode(document.text)
    if not tokens.size:
        raise ValueError(f"document {document.name!r} encodes to no token")
    if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
        raise ValueError(
            f"document {document.name!r} encodes to ids from {tokens.min()} to "
            f"{tokens.max()}; the tokenizer claims [0, {tokenizer.vocab_size})"
        )
    return tokens


def _write(file: Path, tokens: Int32[np.ndarray, " T"]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, tokens, allow_pickle=False)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest().encode("ascii")
    # The digest goes last: a crash in between leaves a file without its digest,
    # which counts as damaged.
    for target, data in ((file, content), (file.with_suffix(".sha256"), digest)):
        # Processes that share a cache write apart and then rename.
        partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        partial.write_bytes(data)
        os.replace(partial, target)


def _open(file: Path) -> Int32[np.ndarray, " T"] | None:
    if not file.exists():
        return None
    try:
        expected = file.with_suffix(".sha256").read_text("ascii")
    except (OSError, UnicodeDecodeError):
        expected = "none"
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        _LOG.warning("%s is damaged (or half written); tokenising again", file)
        return None
    return np.load(file, mmap_mode="r", allow_pickle=False)
