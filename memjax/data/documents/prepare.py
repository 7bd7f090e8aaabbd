"""Parallel tokenisation of a source into a folder, for `prepared`.

Files are written one after the other in the order of the documents, so that they do not
depend on the number of workers. An interrupted preparation resumes after its last
finished file.
"""

import collections
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Int32

from memjax.buckets.bucket import Bucket, as_path
from memjax.buckets.local_copies import put
from memjax.buckets.writing import replaced
from memjax.checks import check_sizes, require_instance, short
from memjax.config_io import AnyPath, read_json
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
from memjax.data.documents.prepared import COLUMNS, MANIFEST, VERSION, index_file
from memjax.data.documents.token_file import TokenisedDocument
from memjax.data.documents.tokenizer import Tokenizer, load_tokenizer
from memjax.data.documents.tokens import default_cache_dir, tokenise
from memjax.leaving import end_with_parent

#: File with the plan of a preparation, written first.
PLAN = "preparing.json"
#: Texts in memory for each worker.
WAITING = 4


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Configuration of a preparation.

    Attributes:
        source: of the documents, as for `open_documents`.
        tokenizer: as for `load_tokenizer`.
        workers: processes that tokenise; does not change the files.
        shard_tokens: minimum tokens of a file but the last.
        record_tokens: maximum tokens of a record.
        rows: how the rows of the source become documents.
    """

    source: str = "embedded"
    tokenizer: str = "bpe4k"
    workers: int = 1
    shard_tokens: int = 2**27
    record_tokens: int = 2**14
    rows: sources.RowConfig = sources.RowConfig()

    def __post_init__(self):
        check_sizes(
            workers=self.workers,
            shard_tokens=self.shard_tokens,
            record_tokens=self.record_tokens,
        )


def prepare(
    config: PrepareConfig,
    folder: AnyPath,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the tokens of all splits of a source; returns the manifest.

    The same call on the same folder resumes an interrupted preparation, and writes
    nothing if it is complete.

    Args:
        config: see `PrepareConfig`.
        folder: new or empty, or of the same preparation; for a bucket it is made in the
            cache and copied.
        progress: called with the number of characters done, and of all.

    Raises:
        ValueError: the source or the tokenizer cannot be read, a text has no token, or
            the folder has other content.
    """
    require_instance("config", config, PrepareConfig)
    folder, tokenizer = as_path(folder), load_tokenizer(config.tokenizer)
    source = sources.open_source(config.source, config.rows)
    entries = scan(source, None)
    plan = _plan(config, tokenizer, entries)
    if (manifest := _done_before(folder, plan)) is not None:
        return manifest
    if isinstance(folder, Path):
        return _write(config, tokenizer, source, entries, plan, folder, progress)
    here = _local_folder(folder)
    manifest = _done_before(here, plan) or _write(
        config, tokenizer, source, entries, plan, here, progress
    )
    # A folder without a manifest is not complete.
    put(here, folder, last=MANIFEST)
    shutil.rmtree(here)
    return manifest


def _done_before(folder: AnyPath, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a complete folder."""
    if not (folder / MANIFEST).is_file():
        return None
    _require_same(folder / MANIFEST, plan)
    return prepared.read_manifest(folder)


def _local_folder(url: AnyPath) -> Path:
    """The local folder in which the files for a bucket are made."""
    name = hashlib.sha256(str(url).encode()).hexdigest()
    here = default_cache_dir() / "prepare" / name
    # With a local manifest, an interrupted copy is resumed.
    if not (here / MANIFEST).is_file() and (names := list(Bucket(url).entries())):
        raise ValueError(f"{url} must be a new or an empty folder, it has {names[0]}")
    return here


def _write(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    source: Source,
    entries: Sequence[Entry],
    plan: dict[str, Any],
    folder: Path,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Tokenises the remaining documents, and writes all files of a folder."""
    _write_plan(folder, plan)
    writers = {split: _Writer(folder, split, plan) for split in SPLITS}
    skip: dict[Split, int] = {split: writers[split].done for split in SPLITS}
    total, done = sum(entry.length for entry in entries), 0
    texts = read_documents(source, entries, None)
    for document, tokens in _tokenised(config, tokenizer, texts, skip):
        if tokens is not None:
            writers[document.split].add(document, tokens)
        done += len(document.text)
        progress(done, total)
    shards = {split: writer.close() for split, writer in writers.items()}
    manifest = plan | {"shards": {split: s for split, s in shards.items() if s}}
    _write_json(folder / MANIFEST, manifest)
    (folder / PLAN).unlink()
    return manifest


def _plan(
    config: PrepareConfig, tokenizer: Tokenizer, entries: Iterable[Entry]
) -> dict[str, Any]:
    """The settings that determine the files."""
    digest = hashlib.sha256()
    for entry in entries:
        said = (entry.name, entry.kind, entry.split, entry.digest.hex())
        digest.update(repr(said).encode("utf-8", "surrogateescape"))
    small = tokenizer.vocab_size <= 2**16
    return {
        "version": VERSION,
        "source": config.source,
        "documents": digest.hexdigest(),
        "tokenizer": config.tokenizer,
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "dtype": "<u2" if small else "<i4",
        "record_tokens": config.record_tokens,
        "shard_tokens": config.shard_tokens,
    }


def _write_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Writes the plan into the folder, or checks the one that is there."""
    if (folder / PLAN).is_file():
        _require_same(folder / PLAN, plan)
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} must be a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / PLAN, plan)


def _require_same(file: AnyPath, plan: dict[str, Any]) -> None:
    found = read_json(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file} must be an object, got {short(found)}")
    # Source and tokenizer may have other names; their digests count.
    for key in [key for key in plan if key not in ("source", "tokenizer")]:
        if found.get(key) != plan[key]:
            raise ValueError(
                f"{file.parent} holds another preparation: {key} was "
                f"{short(found.get(key))} and is now {plan[key]}"
            )


def _tokenised(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    texts: Iterable[Document],
    skip: dict[Split, int],
) -> Iterator[tuple[Document, Int32[np.ndarray, " T"] | None]]:
    """Documents in their order with their tokens, None for those already written."""
    seen = collections.Counter()

    def wanted(document: Document) -> bool:
        seen[document.split] += 1
        return seen[document.split] > skip[document.split]

    if config.workers == 1:
        for document in texts:
            found = tokenise(document, tokenizer) if wanted(document) else None
            yield document, found
        return
    # Spawned: a fork would copy the threads' locks.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        config.workers, spawn, _begin_worker, (config.tokenizer,)
    ) as pool:
        yield from _in_order(pool, texts, wanted, WAITING * config.workers)


def _in_order(
    pool: Executor,
    texts: Iterable[Document],
    wanted: Callable[[Document], bool],
    most: int,
) -> Iterator[tuple[Document, Any]]:
    """Results of the workers in the order of the documents; `most` are pending."""
    waiting = collections.deque()

    def first():
        document, future = waiting.popleft()
        return document, None if future is None else future.result()

    try:
        for document in texts:
            future = pool.submit(_work, document) if wanted(document) else None
            waiting.append((document, future))
            if len(waiting) >= most:
                yield first()
        while waiting:
            yield first()
    finally:
        for _, future in waiting:
            if future is not None:
                future.cancel()


def _begin_worker(name: str) -> None:
    global _tokenizer
    end_with_parent()
    parent = multiprocessing.parent_process()
    # It may have ended while this process imported.
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
    _tokenizer = load_tokenizer(name)


def _work(document: Document) -> Int32[np.ndarray, " T"]:
    return tokenise(document, _tokenizer)


class _Writer:
    """Writes the documents of a split to one file after the other.

    Attributes:
        done: documents in files that were finished before.
    """

    def __init__(self, folder: Path, split: Split, plan: dict[str, Any]):
        self._folder, self._split, self._plan = folder, split, plan
        self._shards: list[dict[str, Any]] = []
        self._writer: ArrayRecordWriter | None = None
        while (shard := _finished(self._file())) is not None:
            self._shards.append(shard)
        self.done = sum(shard["documents"] for shard in self._shards)

    def add(self, document: Document, tokens: Int32[np.ndarray, " T"]) -> None:
        """Appends a document."""
        writer = self._writer
        if writer is None:
            self._index: dict[str, list[Any]] = {column: [] for column in COLUMNS}
            self._tokens = 0
            # An unfinished file of an earlier run; a link there would be followed.
            self._file().unlink(missing_ok=True)
            writer = ArrayRecordWriter(str(self._file()), "group_size:1")
            self._writer = writer
        size = self._plan["record_tokens"]
        for begin in range(0, len(tokens), size):
            part = tokens[begin : begin + size].astype(self._plan["dtype"])
            writer.write(part.tobytes())
        row = TokenisedDocument(document.name, document.kind, tokens)
        values = (row.name, row.kind, len(tokens), token_file.tokens_digest(row))
        for column, value in zip(COLUMNS, values, strict=True):
            self._index[column].append(value)
        self._tokens += len(tokens)
        if self._tokens >= self._plan["shard_tokens"]:
            self._finish()

    def close(self) -> list[dict[str, Any]]:
        """Finishes the last file; returns the split's part of the manifest."""
        if self._writer is not None:
            self._finish()
        return self._shards

    def _file(self) -> Path:
        return self._folder / prepared.shard_name(self._split, len(self._shards))

    def _finish(self) -> None:
        assert self._writer is not None
        self._writer.close()
        file, self._writer = self._file(), None
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        # The index marks the file as complete.
        _write_json(index_file(file), self._index | {"bytes": file.stat().st_size})
        finished = _finished(file)
        assert finished is not None
        self._shards.append(finished)


def _finished(file: Path) -> dict[str, Any] | None:
    """The entry of a finished file in the manifest; None of any other."""
    index = index_file(file)
    if not index.is_file():
        return None
    content = index.read_bytes()
    found = prepared.read_index(content, index)
    # It was complete, and is written again.
    if not file.is_file() or file.stat().st_size != found.bytes:
        return None
    return {
        "file": file.name,
        "bytes": found.bytes,
        "index_sha256": hashlib.sha256(content).hexdigest(),
        "documents": len(found.names),
        "tokens": sum(found.lengths),
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with replaced(file) as stream:
        stream.write(json.dumps(content, indent=1).encode("utf-8"))
