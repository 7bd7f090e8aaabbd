"""Tokenised documents: tokenised once, cached on disk, memory-mapped."""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from memjax.buckets.writing import replaced
from memjax.data.documents import prepared, sources, token_file
from memjax.data.documents.documents import (
    SPLITS,
    Document,
    Entry,
    Source,
    Split,
    read_documents,
    scan,
)
from memjax.data.documents.sources import RowConfig as RowConfig
from memjax.data.documents.token_file import TokenisedDocument as TokenisedDocument
from memjax.data.documents.tokenizer import Tokenizer, encode_prompt

# Of the tokens of a text: another one is another file.
_FORM = "behind first tokens"


def load_tokens(
    spec: str,
    tokenizer: Tokenizer,
    split: Split,
    cache_dir: Path | str | None = None,
    rows: RowConfig = sources.ROWS,
) -> list[TokenisedDocument]:
    """Returns the documents of one split, tokenised once and cached.

    The tokens of a split are in one memory-mapped file, named after its texts and the
    tokenizer. The texts of an unchanged source (by its files' sizes and times) are not
    read again. A damaged file is named in the log and rebuilt; its digest is checked if
    its size or times have changed. Several processes may share a cache.

    Args:
        spec: a source, as for `open_documents`, or "prepared:FOLDER", with tokens that
            are read lazily.
        tokenizer: see `load_tokenizer`.
        split: "train", "validation" or "test".
        cache_dir: None means `$XDG_CACHE_HOME/memjax`, or `~/.cache/memjax`.
        rows: how rows become documents; not for prepared tokens.

    Raises:
        ValueError: unknown split, no document in it, or a source that cannot be read.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {', '.join(SPLITS)}")
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    if (prepared_folder := sources.prepared_folder(spec)) is not None:
        sources.check_source(spec, rows)
        return prepared.load(prepared_folder, tokenizer, split, cache)
    folder = cache / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    source = sources.open_source(spec, rows)
    # Names the token file of a source of this version.
    link = None
    if source.version is not None:
        name = _digest(_FORM, source.version, split, tokenizer.digest)
        link = folder / f"{name}.source"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            key = link.read_text("ascii")
            if key.isalnum() and (found := token_file.read(folder / key)) is not None:
                return found
    key, documents = _load(source, tokenizer, split, folder, spec)
    if link is not None:
        with replaced(link) as stream:
            stream.write(key.encode("ascii"))
    return documents


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/memjax`, or `~/.cache/memjax` if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "memjax"


def _load(
    source: Source, tokenizer: Tokenizer, split: Split, folder: Path, spec: str
) -> tuple[str, list[TokenisedDocument]]:
    """Reads the texts, and tokenises them unless their tokens are cached."""
    entries = scan(source, split)
    chosen = [entry for entry in entries if entry.split == split]
    if not chosen:
        raise ValueError(
            f"source={spec!r} has no document in split={split!r}; a source without "
            "splits of its own needs two documents of a kind for validation, three "
            "for test"
        )
    key = _key(chosen, tokenizer)
    documents = token_file.read(folder / key)
    if documents is None:
        texts = read_documents(source, entries, split)
        token_file.write(
            folder / key,
            (TokenisedDocument(d.name, d.kind, tokenise(d, tokenizer)) for d in texts),
        )
        # Read back with all checks.
        documents = token_file.read(folder / key)
    if documents is None:
        raise OSError(f"{folder / key}.tokens does not read back as it was written")
    return key, documents


def _key(entries: Sequence[Entry], tokenizer: Tokenizer) -> str:
    said = ((e.name, e.kind, e.digest.hex()) for e in entries)
    return _digest(_FORM, tokenizer.digest, *map(repr, said))


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # By its own digest, so that two parts cannot merge.
        encoded = part.encode("utf-8", "surrogateescape")
        digest.update(hashlib.sha256(encoded).digest())
    return digest.hexdigest()


def tokenise(document: Document, tokenizer: Tokenizer) -> Int32[np.ndarray, " T"]:
    """The ids of a document behind `first_tokens`, all of them in the vocabulary.

    Raises:
        ValueError: there is none, or an id beyond the vocabulary.
    """
    tokens = encode_prompt(tokenizer, document.text)
    if not tokens.size:
        raise ValueError(f"document {document.name!r} encodes to no token")
    if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
        raise ValueError(
            f"document {document.name!r} encodes to ids from {tokens.min()} to "
            f"{tokens.max()}; the tokenizer claims [0, {tokenizer.vocab_size})"
        )
    return tokens
