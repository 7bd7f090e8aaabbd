"""Folders of prepared tokens in ArrayRecord files; `prepare` writes them.

    manifest.json            the settings, and all files with their sizes
    train-00000.array_record records of at most `record_tokens` ids of one document each
    train-00000.json         its documents: names, kinds, lengths, digests of tokens

A document's records are consecutive, so that a chunk of it is read from one or two of
them. ArrayRecord stores a hash of each record, so that damage is detected when it is
read.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from memjax.buckets.local_copies import cached_files
from memjax.checks import short
from memjax.config_io import AnyPath, parse_json, read_json
from memjax.data.documents.documents import Split
from memjax.data.documents.record_tokens import RecordTokens
from memjax.data.documents.token_file import TokenisedDocument
from memjax.data.documents.tokenizer import Tokenizer

FORM = "prepared"
MANIFEST = "manifest.json"
#: Raised when another version would read the tokens as what they are not.
VERSION = 2
#: Fields of a document in the index.
COLUMNS = ("names", "kinds", "lengths", "digests")
#: Decoded records in the cache: the rows of a batch are from as many documents.
CACHED_RECORDS = 64


def load(
    folder: AnyPath, tokenizer: Tokenizer, split: Split, cache: Path
) -> list[TokenisedDocument]:
    """The documents of one split; their tokens are read lazily.

    ArrayRecord cannot read buckets: the split's files are copied into `cache` once.

    Raises:
        ValueError: no such folder, another tokenizer, no document in the split, or a
            file that is missing or not as it was written.
    """
    manifest = read_manifest(folder)
    if manifest["tokenizer_digest"] != tokenizer.digest:
        raise ValueError(
            f"{folder} was prepared with tokenizer={manifest['tokenizer']!r}, whose "
            f"digest {manifest['tokenizer_digest'][:16]} is not that of the "
            f"tokenizer given, {tokenizer.digest[:16]}"
        )
    shards = manifest["shards"].get(split, [])
    if not shards:
        raise ValueError(f"{folder} has no document in split={split!r}")
    if not isinstance(folder, Path):
        paths = [Path(shard["file"]) for shard in shards]
        names = [str(name) for path in paths for name in (path, index_file(path))]
        folder = cached_files(folder, names, cache)
    indices = [_checked_index(folder, shard) for shard in shards]
    files = [str(folder / shard["file"]) for shard in shards]
    size, dtype = manifest["record_tokens"], np.dtype(manifest["dtype"])
    record = _reader(files, dtype)
    documents, first = [], 0
    rows = (zip(*(index[c] for c in COLUMNS), strict=True) for index in indices)
    for name, kind, length, digest in itertools.chain.from_iterable(rows):
        tokens = RecordTokens(record, first, length, size, manifest["vocab_size"])
        documents.append(TokenisedDocument(name, kind, tokens, digest))
        first += -(-length // size)
    return documents


def read_manifest(folder: AnyPath) -> dict[str, Any]:
    """The manifest.

    Raises:
        ValueError: the folder has no complete preparation of this version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} holds no prepared documents: {MANIFEST} is written when "
            "memjax data prepare is done"
        )
    manifest = read_json(file)
    if not isinstance(manifest, dict):
        raise ValueError(f"{file} must be an object, got {short(manifest)}")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{file} is of version {manifest.get('version')}, this memjax reads "
            f"{VERSION}"
        )
    return manifest


def _reader(files: list[str], dtype: np.dtype) -> Callable[[int], np.ndarray]:
    """A cached function that decodes record i of all files."""
    try:
        source = ArrayRecordDataSource(files)
    except RuntimeError as error:
        folder = Path(files[0]).parent
        raise ValueError(f"{folder}: damaged records: {short(error)}") from error

    @functools.lru_cache(maxsize=CACHED_RECORDS)
    def record(i: int) -> np.ndarray:
        try:
            content = source[i]
        # The library's error names no file.
        except RuntimeError as error:
            folder = Path(files[0]).parent
            raise ValueError(f"{folder}: record {i} cannot be read: {error}") from error
        ids = np.frombuffer(content, dtype).astype(np.int32)
        ids.flags.writeable = False
        return ids

    return record


def _checked_index(folder: Path, shard: dict[str, Any]) -> dict[str, Any]:
    """The index of a file, after checks of both."""
    file = folder / shard["file"]
    if not file.is_file() or file.stat().st_size != shard["bytes"]:
        found = f"{file.stat().st_size:,} bytes" if file.is_file() else "nothing"
        raise ValueError(
            f"{file} must have {shard['bytes']:,} bytes, as its manifest says, but "
            f"there is {found}: copy it again, or prepare the documents anew"
        )
    index = index_file(file)
    content = index.read_bytes() if index.is_file() else b""
    if hashlib.sha256(content).hexdigest() != shard["index_sha256"]:
        raise ValueError(f"{index} is not as it was written")
    return parse_json(content, f"{index} is")


def index_file(file: Path) -> Path:
    """The index of an ArrayRecord file."""
    return file.with_suffix(".json")
