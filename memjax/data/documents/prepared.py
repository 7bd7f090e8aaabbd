"""Folders of prepared tokens in ArrayRecord files; `prepare` writes them.

    manifest.json            the settings, and all files with their sizes
    train-00000.array_record records of at most `record_tokens` ids of one document each
    train-00000.json         its documents: names, kinds, lengths, digests of tokens

A document's records are consecutive, so that a chunk of it is read from one or two of
them. ArrayRecord stores a hash of each record, so that damage is detected when it is
read.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource

from memjax.buckets.local_copies import cached_files
from memjax.checks import check_sizes, short
from memjax.config_io import AnyPath, from_record, parse_json, read_json
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a preparation, as in `PrepareConfig`, and digests.

    Attributes:
        documents: digest of names, kinds, splits and texts.
        tokenizer_digest: of the tokenizer.
        vocab_size: of the tokenizer.
        dtype: of the ids in a record.
    """

    version: Literal[2]
    source: str
    documents: str
    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    dtype: Literal["<u2", "<i4"]
    record_tokens: int
    shard_tokens: int

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, record_tokens=self.record_tokens)
        check_sizes(shard_tokens=self.shard_tokens)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records in the manifest: size, index, and content."""

    file: str
    bytes: int
    index_sha256: str
    documents: int
    tokens: int

    def __post_init__(self) -> None:
        if min(self.bytes, self.documents, self.tokens) < 1:
            raise ValueError(f"bytes, documents and tokens must be at least 1: {self}")


@dataclasses.dataclass(frozen=True)
class Index:
    """The documents of a file of records, column by column, and its size."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    digests: tuple[str, ...]
    bytes: int

    def __post_init__(self) -> None:
        columns = {name: len(getattr(self, name)) for name in COLUMNS}
        if len({*columns.values()}) > 1 or not self.names:
            raise ValueError(f"names to digests must be of one length, got {columns}")
        if min(*self.lengths, self.bytes) < 1:
            raise ValueError(f"lengths and bytes must be at least 1: {short(self)}")


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
    files = [folder / shard["file"] for shard in shards]
    size, dtype = manifest["record_tokens"], np.dtype(manifest["dtype"])
    counts = [sum(-(-length // size) for length in i.lengths) for i in indices]
    record = _reader(files, counts, dtype)
    documents, first = [], 0
    rows = (zip(*(getattr(i, c) for c in COLUMNS), strict=True) for i in indices)
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
            f"{file} is of version {short(manifest.get('version'))}, this memjax reads "
            f"{VERSION}"
        )
    shards = manifest.get("shards")
    from_record(Plan, {n: v for n, v in manifest.items() if n != "shards"}, str(file))
    if not isinstance(shards, dict) or not {*shards} <= {*get_args(Split)}:
        allowed = ", ".join(get_args(Split))
        raise ValueError(
            f"{file}.shards must have keys of {allowed}, got {short(shards)}"
        )
    for split, found in shards.items():
        where = f"{file}.shards.{split}"
        if not isinstance(found, list) or not found:
            raise ValueError(f"{where} must list files, got {short(found)}")
        for i, shard in enumerate(found):
            name = from_record(Shard, shard, f"{where}[{i}]").file
            if name != shard_name(split, i):
                raise ValueError(
                    f"{where}[{i}].file must be {shard_name(split, i)!r}, got "
                    f"{short(name)}"
                )
    for split in get_args(Split):
        # A file that the manifest has lost would be documents lost in silence.
        further = shard_name(split, len(shards.get(split, [])))
        if (folder / further).exists():
            raise ValueError(f"{file}.shards.{split} does not list {further}")
    return manifest


def shard_name(split: str, number: int) -> str:
    """The name of a file of records."""
    return f"{split}-{number:05}.array_record"


def read_index(content: bytes, file: Path) -> Index:
    """The index of a file of records.

    Raises:
        ValueError: naming `file` and the key that is wrong.
    """
    return from_record(Index, parse_json(content, f"{file} is"), str(file))


def _reader(
    files: list[Path], counts: list[int], dtype: np.dtype
) -> Callable[[int], np.ndarray]:
    """A cached function that decodes record i of all files, which have `counts`."""
    sources = [_opened(*each) for each in zip(files, counts, strict=True)]
    starts = list(itertools.accumulate(counts, initial=0))

    @functools.lru_cache(maxsize=CACHED_RECORDS)
    def record(i: int) -> np.ndarray:
        at = bisect.bisect_right(starts, i) - 1
        try:
            content = sources[at][i - starts[at]]
        except RuntimeError as error:
            raise _damage(files[at], f"record {i - starts[at]}: {error}") from error
        if len(content) % dtype.itemsize:
            raise _damage(files[at], f"{len(content)} bytes in record {i - starts[at]}")
        ids = np.frombuffer(content, dtype).astype(np.int32)
        ids.flags.writeable = False
        return ids

    return record


def _opened(file: Path, count: int) -> ArrayRecordDataSource:
    # One source a file: the errors of a source of several name none.
    try:
        source = ArrayRecordDataSource(str(file))
    except RuntimeError as error:
        raise _damage(file, str(error)) from error
    if len(source) != count:
        raise _damage(file, f"{len(source)} records, and {count} in its index")
    return source


def _damage(file: Path, found: str) -> ValueError:
    return ValueError(
        f"{file} is damaged ({found}): copy it again, or prepare the documents anew"
    )


def _checked_index(folder: Path, shard: dict[str, Any]) -> Index:
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
    found = read_index(content, index)
    for name, size in {
        "bytes": found.bytes,
        "documents": len(found.names),
        "tokens": sum(found.lengths),
    }.items():
        if shard[name] != size:
            raise ValueError(f"{index} has {size} {name}, its manifest {shard[name]}")
    return found


def index_file(file: Path) -> Path:
    """The index of an ArrayRecord file."""
    return file.with_suffix(".json")
