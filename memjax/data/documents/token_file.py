"""A file with the tokens of many documents, and its index.

`<key>.tokens` has the ids of all documents one after another, as little-endian int32.
`<key>.index` is written after it: a first line with the SHA-256 of the rest, which is
JSON with the documents' names, kinds, lengths and digests and the SHA-256 of all
tokens. The tokens are hashed when they are written, and again only if size or times of
the file have changed: hashing a large file is too slow for every start.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.buckets.writing import replaced
from memjax.config_io import parse_json
from memjax.data.documents.record_tokens import RecordTokens

_LOG = logging.getLogger(__name__)
_DTYPE = np.dtype("<i4")


class TokenisedDocument(NamedTuple):
    """One document as ids.

    Attributes:
        name: as in `Document`.
        kind: as in `Document`.
        tokens: [T], at least one, memory-mapped read-only from the cache, or in the
            records of prepared files.
        digest: of the tokens, computed when they were written; "" if unknown.
    """

    name: str
    kind: str
    tokens: Int32[np.ndarray, " T"] | RecordTokens
    digest: str = ""


def content_digest(documents: Iterable[TokenisedDocument]) -> str:
    """A digest of the tokens of all documents, in their order."""
    digests = "".join(d.digest or tokens_digest(d) for d in documents)
    return _digest(digests.encode("ascii"))


def tokens_digest(document: TokenisedDocument) -> str:
    """`TokenisedDocument.digest` of its tokens."""
    return _digest(_as_bytes(document.tokens))


def _digest(content: bytes) -> str:
    # 64 bits: against mistakes, not against forgery.
    return hashlib.sha256(content).hexdigest()[:16]


def _as_bytes(tokens: Int32[np.ndarray, " T"] | RecordTokens) -> bytes:
    return np.asarray(tokens).astype(_DTYPE, copy=False).tobytes()


def write(base: Path, documents: Iterable[TokenisedDocument]) -> None:
    """Writes both files of `base`, with one document in memory at a time.

    Several processes may write the same files at once.
    """
    digest, names, kinds, lengths, digests = hashlib.sha256(), [], [], [], []
    tokens_file = base.with_suffix(".tokens")
    with replaced(tokens_file) as stream:
        for document in documents:
            content = _as_bytes(document.tokens)
            digest.update(content)
            stream.write(content)
            names.append(document.name)
            kinds.append(document.kind)
            lengths.append(len(document.tokens))
            digests.append(_digest(content))
    record: dict[str, Any] = dict(names=names, kinds=kinds, lengths=lengths)
    record["digests"] = digests
    record["sha256"] = digest.hexdigest()
    _write_index(base, record, tokens_file.stat())


def read(base: Path) -> list[TokenisedDocument] | None:
    """The documents of `base`, memory-mapped; None if a file is missing or damaged.

    All documents are views of one mapping: no file stays open.
    """
    index, tokens_file = base.with_suffix(".index"), base.with_suffix(".tokens")
    if not index.exists() or not tokens_file.exists():
        return None
    try:
        return _mapped(_checked_record(base), tokens_file)
    # `ArithmeticError` of numbers too large for numpy.
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as error:
        _LOG.warning("%s is damaged (%s); tokenising again", tokens_file, error)
        return None


def _write_index(base: Path, record: dict[str, Any], status: os.stat_result) -> None:
    record = record | {"seen": _times(status)}
    body = json.dumps(record).encode("utf-8")
    with replaced(base.with_suffix(".index")) as stream:
        stream.write(hashlib.sha256(body).hexdigest().encode("ascii") + b"\n" + body)


def _times(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _checked_record(base: Path) -> dict[str, Any]:
    """The index, after checks of all digests."""
    content = base.with_suffix(".index").read_bytes()
    said, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode("ascii") != said:
        raise ValueError("its index has another digest")
    record = parse_json(body, "its index is")
    tokens_file = base.with_suffix(".tokens")
    status = tokens_file.stat()
    if record["seen"] == _times(status):
        return record
    with tokens_file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != record["sha256"]:
        raise ValueError("it has another digest")
    # Copied or touched, but undamaged: the next start need not hash it again. The cache
    # may be read-only.
    with contextlib.suppress(OSError):
        _write_index(base, record, status)
    return record


def _mapped(record: dict[str, Any], file: Path) -> list[TokenisedDocument]:
    ids = np.memmap(file, _DTYPE, mode="r")
    ends = np.cumsum(np.array(record["lengths"], np.int64)).tolist()
    if not ends or ends[-1] != len(ids):
        raise ValueError("its index is of another length")
    # A plain view of the mapping: slices of np.memmap itself are slow to make.
    view = np.asarray(ids).view(np.ndarray)
    starts = [0, *ends[:-1]]
    # Files of earlier versions have none.
    digests = record.get("digests") or [""] * len(ends)
    rows = zip(record["names"], record["kinds"], starts, ends, digests, strict=True)
    return [
        TokenisedDocument(n, k, view[start:end], digest)
        for n, k, start, end, digest in rows
    ]
