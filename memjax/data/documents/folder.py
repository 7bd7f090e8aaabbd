"""Documents from a folder of text, Markdown, JSONL or parquet files."""

import hashlib
import io
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from memjax.buckets.bucket import Bucket, as_path, is_bucket
from memjax.checks import listed
from memjax.config_io import AnyPath, parse_json
from memjax.data.documents.documents import SPLITS, Document, Source, Split

_LOG = logging.getLogger(__name__)

#: Bytes of one document. Tokenizers need tens of times the memory of a text.
MAX_DOCUMENT = 2**27
#: Bytes of text in one row group of parquet, which is decoded whole.
MAX_ROW_GROUP = 2**30
# Clocks of file systems tick in milliseconds: a younger file may change again without
# a new time of change.
SETTLED_SECONDS = 2.0


class _File(NamedTuple):
    """A regular file or an object of a bucket.

    Attributes:
        path: path or URL.
        parts: its path within the root.
        size: in bytes.
        stamp: times in ns, or the store's checksum; differs when the content does.
    """

    # Not a Path, which takes longer to make than to read a short file.
    path: str
    parts: tuple[str, ...]
    size: int
    stamp: tuple[int, ...] | str


def folder_source(path: AnyPath | str) -> Source:
    """The documents of a folder and its sub-folders, sorted by name.

    A folder in a bucket is read in place.

    `.txt` and `.md` files are one document each; `.jsonl` has one JSON object a line
    with a "text" string; `.parquet` has a "text" column. Other files are ignored and
    counted in the log. If every file is under a folder named train, validation or test,
    those are the splits; otherwise `assign_splits` decides. The kind is the name of the
    (next) sub-folder, or "text" without one.

    Raises:
        ValueError: no such folder, nothing readable in it, or only some files under
            split folders; from `read`: a file is malformed, holds an empty text or
            one of more than `MAX_DOCUMENT` bytes (named, with the line).
        ImportError: from `read`: a parquet file is there and pyarrow is not.
    """
    root = as_path(path)
    if not root.is_dir():
        raise ValueError(f"path={str(path)!r} is not a folder")
    files = _readable_files(root)
    by_folder = [len(f.parts) > 1 and f.parts[0] in SPLITS for f in files]
    # The splits of other files would contradict the folders.
    if any(by_folder) and not all(by_folder):
        raise ValueError(
            f"{root} has files inside and outside split folders, for example "
            f"{files[by_folder.index(True)].path} and "
            f"{files[by_folder.index(False)].path}; "
            f"put all of them under {'/, '.join(SPLITS)}/, or none"
        )
    has_splits = all(by_folder)

    def read(split: Split | None) -> Iterator[Document]:
        for file in files:
            if not has_splits or split in (None, file.parts[0]):
                yield from _read(file, has_splits)

    return Source(read, has_splits, _version(files))


def files_version(root: AnyPath) -> str | None:
    """A digest of the files' names, sizes and times; None if one may still change."""
    return _version(_files(root))


def _readable_files(root: AnyPath) -> list[_File]:
    present = _files(root)
    files = [file for file in present if _suffix(file.path) in _READERS]
    if not files:
        raise ValueError(
            f"path={str(root)!r} holds no file ending in {', '.join(_READERS)}"
        )
    if len(files) < len(present):
        _LOG.info("%s: %d other files left alone", root, len(present) - len(files))
    return files


def _files(root: AnyPath) -> list[_File]:
    """All regular files sorted by name; devices and pipes have no end."""
    files = []
    if is_bucket(root):
        entries = Bucket(root).entries().items()
        found = (
            _File(f"{root}/{name}", tuple(name.split("/")), entry.size, entry.checksum)
            for name, entry in entries
        )
        return sorted(found, key=lambda file: file.parts)
    for folder, _, names in os.walk(root):
        within = Path(folder).relative_to(root).parts
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except OSError:  # a link to nothing
                continue
            if stat.S_ISREG(status.st_mode):
                times = (status.st_mtime_ns, status.st_ctime_ns)
                files.append(_File(path, (*within, name), status.st_size, times))
    return sorted(files, key=lambda file: file.parts)


def _version(files: Sequence[_File]) -> str | None:
    """See `files_version`."""
    times = [t for file in files if isinstance(file.stamp, tuple) for t in file.stamp]
    if not files or max(times, default=0) / 1e9 > time.time() - SETTLED_SECONDS:
        return None
    digest = hashlib.sha256()
    for file in files:
        said = repr((file.parts, file.size, file.stamp))
        digest.update(said.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read(file: _File, has_split: bool) -> Iterator[Document]:
    folders = file.parts[1 if has_split else 0 : -1]
    split: Split = file.parts[0] if has_split else "train"  # pyright: ignore
    kind = folders[0] if folders else "text"
    name = "/".join(file.parts)
    for suffix, text in _READERS[_suffix(file.path)](file.path):
        _check_text(text, f"{file.path}{suffix}")
        yield Document(name + suffix, kind, split, text)


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _read_text(file: str) -> Iterator[tuple[str, str]]:
    with _opened(file) as stream:
        content = stream.read(MAX_DOCUMENT + 1)
    _check_size(len(content), file)
    try:
        yield "", content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{line}: not UTF-8 ({error.reason})") from error


def _read_jsonl(file: str) -> Iterator[tuple[str, Any]]:
    # Bytes, as lines of str also end at characters that JSON may hold.
    with _opened(file) as stream:
        lines = iter(lambda: stream.readline(MAX_DOCUMENT + 1), b"")
        for number, line in enumerate(lines, start=1):
            _check_size(len(line), f"{file}:{number}")
            if not line.strip():
                continue
            record = parse_json(line, f"{file}:{number}:")
            if not isinstance(record, dict) or "text" not in record:
                raise ValueError(f'{file}:{number}: needs an object with a "text" key')
            yield f":{number}", record["text"]


def _read_parquet(file: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(
            f"{file} needs pyarrow: pip install 'memjax[data]'"
        ) from error
    try:
        # A bucket is read in the ranges that are needed.
        table = parquet.ParquetFile(_opened(file) if is_bucket(file) else file)
        if "text" not in table.schema_arrow.names:
            raise ValueError(
                f'{file}: no "text" column; it has {listed(table.schema_arrow.names)}'
            )
        _check_row_groups(file, table.metadata, table.schema_arrow.names.index("text"))
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            # One by one: a dictionary may repeat a long text in every row.
            for text in batch.column(0):
                row += 1
                yield f":{row}", text.as_py()
    except (ArrowException, OSError, MemoryError) as error:
        raise ValueError(f"{file}: not a readable parquet file ({error})") from error


def _opened(file: str) -> BinaryIO:
    # A Path takes longer to make than a short file to read.
    if not is_bucket(file):
        return open(file, "rb")
    stream: Any = as_path(file).open("rb")
    # Its `readline` takes no limit.
    return io.BufferedReader(stream)


_READERS: dict[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _check_row_groups(file: str, metadata: Any, column: int) -> None:
    """Raises ValueError on a row group that is too large to be decoded as a whole."""
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        size = columns.column(column).total_uncompressed_size
        if size > MAX_ROW_GROUP:
            raise ValueError(
                f"{file}: row group {group} decodes to {size:,} bytes of text, of at "
                f"most {MAX_ROW_GROUP:,}; write it with smaller row groups"
            )


def _check_size(size: int, where: str) -> None:
    if size > MAX_DOCUMENT:
        raise ValueError(
            f"{where}: more than {MAX_DOCUMENT:,} bytes, which one document may have; "
            "split it"
        )


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{where}: text is {type(text).__name__}, not a string")
    if not text:
        raise ValueError(f"{where}: the text is empty")
    try:
        _check_size(len(text.encode("utf-8")), where)
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not valid Unicode ({error.reason})") from error
