"""Documents from a file, or from the files of a folder."""

import collections
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from memjax.buckets.bucket import Bucket, as_path, is_bucket
from memjax.config_io import AnyPath
from memjax.data.documents.documents import (
    SPLIT_NAMES,
    SPLITS,
    Document,
    Source,
    Split,
)
from memjax.data.documents.readers import COMPRESSIONS, KINDS, kind_of, read_rows

# Size of a file that a link names and that is not there.
_GONE = -1
# Clocks of file systems tick in milliseconds: a younger file may change again without
# a new time of change.
SETTLED_SECONDS = 2.0
# "train", "c4-train.00000-of-01024", "wiki_valid2": a split, and perhaps a number.
_SPLIT_STEM = re.compile(rf"(.*[-_.])?({'|'.join(SPLIT_NAMES)})([-_.]?\d[-_.\w]*)?")

# "my_train_data": a split between words, where all files have one.
_SPLIT_WORD = re.compile(rf"(.*[-_.])?({'|'.join(SPLIT_NAMES)})([-_.].*)?")
# "train-00000-of-00003": a file of several.
_NUMBERED = re.compile(r"(.*?)\d+-of-(\d+)(?!\d)(.*)")

# Descriptions of a data set: no documents.
_CARDS = ("readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")


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


class _Place(NamedTuple):
    """The split that the name of a file or of a folder gives.

    Attributes:
        split: of the file.
        within: folder that has the split's file or folder.
        name: of the folder; of a file, without its number.
        after: folders below that of the split.
    """

    split: Split
    within: tuple[str, ...]
    name: str
    after: tuple[str, ...]


def files_source(
    path: AnyPath | str, column: str | None = None, by_line: bool = False
) -> Source:
    """The documents of a file, or of a folder and its sub-folders, sorted by name.

    A `.txt` or `.md` file is one document; a `.jsonl` or `.json` file has objects, one
    a line or in an array, and a `.parquet` file rows. All but parquet may be compressed
    as `.gz` or `.zst`. Hidden files and folders are left out; so are the data set's
    `README.md` and `dataset_info.json`, and files of other kinds, which the notes name.
    Buckets are read in place.

    Names of files or folders give the splits, as on the Hugging Face hub:
    `train.jsonl`, `data/train-00000-of-00003.parquet`, `validation/a.txt`. Without such
    names, or with "train" alone, `assign_splits` decides. The kind is the name of the
    (next) sub-folder, or "text" without one.

    Args:
        path: of the file or folder.
        column: as for `read_rows`.
        by_line: as for `read_rows`.

    Raises:
        ValueError: no such path, nothing readable in it, only some files with a
            split, or two names for one split; from `read`: as `read_rows`.
        ImportError: from `read`: pyarrow is needed, and missing.
    """
    root = as_path(path)
    if root.is_file():
        if not kind_of(root.name):
            raise ValueError(f"path={str(path)!r} must end in {_endings()}")
        files, notes = [_only_file(root)], []
    elif root.is_dir():
        files, notes = _readable_files(root)
    else:
        raise ValueError(f"path={str(path)!r} is neither a file nor a folder")
    places = _places(root, files)
    has_splits = {place.split for place in places.values()} not in ({"train"}, set())
    if has_splits:
        notes = [*_split_notes(places), *notes]
    notes += _missing_notes(files)

    def read(split: Split | None) -> Iterator[Document]:
        for file in files:
            place = places.get(file.path)
            mine = place.split if place else "train"
            if has_splits and split not in (None, mine):
                continue
            name, kind = "/".join(file.parts), _kind(file, place)
            for row, text in read_rows(file.path, column, by_line):
                yield Document(name + row, kind, mine, text or "")

    version = _version(files)
    if version is not None:
        version = hashlib.sha256(repr((version, column, by_line)).encode()).hexdigest()
    return Source(read, has_splits, version, tuple(notes))


def files_version(root: AnyPath) -> str | None:
    """A digest of the files' names, sizes and times; None if one may still change."""
    return _version(_files(root))


def _endings() -> str:
    return f"{', '.join(KINDS)}, or with {' or '.join(COMPRESSIONS)} behind it"


def _readable_files(root: AnyPath) -> tuple[list[_File], list[str]]:
    """The files of documents, and a note of those that are left out."""
    seen = [
        file
        for file in _files(root)
        if not any(part.startswith(".") for part in file.parts)
    ]
    cards = [f for f in seen if len(f.parts) == 1 and f.parts[0].lower() in _CARDS]
    present = [file for file in seen if file not in cards]
    gone = sum(file.size == _GONE for file in present)
    present = [file for file in present if file.size != _GONE]
    files = [file for file in present if kind_of(file.path)]
    if not files:
        raise ValueError(f"path={str(root)!r} holds no file ending in {_endings()}")
    other = collections.Counter(
        os.path.splitext(file.path)[1] or "no suffix"
        for file in present
        if not kind_of(file.path)
    )
    named = [f"{count:,} x {suffix}" for suffix, count in sorted(other.items())]
    named += [file.parts[0] for file in cards]
    named += [f"{gone:,} x links to nothing"] if gone else []
    return files, [f"left out: {', '.join(named)}"] if named else []


def _place(file: _File, pattern: re.Pattern[str] = _SPLIT_STEM) -> _Place | None:
    """The first folder that is named after a split, or else the file's own name."""
    folders = file.parts[:-1]
    for i, folder in enumerate(folders):
        if folder.lower() in SPLIT_NAMES:
            split = SPLIT_NAMES[folder.lower()]
            return _Place(split, folders[:i], f"{folder}/", folders[i + 1 :])
    whole = file.parts[-1].lower()
    # The first suffix of a kind: a number may follow the split behind a dot.
    stem = re.split(rf"({'|'.join(map(re.escape, KINDS))})\b", whole)[0]
    found = pattern.fullmatch(stem)
    if found is None:
        return None
    name = f"{found[1] or ''}{found[2]}{'-*' if found[3] else ''}{whole[len(stem) :]}"
    return _Place(SPLIT_NAMES[found[2]], folders, name, ())


def _places(root: AnyPath, files: Sequence[_File]) -> dict[str, _Place]:
    """The place of each file by its path, empty where names give no splits."""
    found = {file.path: place for file in files if (place := _place(file)) is not None}
    if not found:
        # As hubs read names; in the titles of some files it is a word.
        words = [(file.path, _place(file, _SPLIT_WORD)) for file in files]
        found = {path: place for path, place in words if place is not None}
        splits = {place.split for place in found.values()}
        if len(found) < len(files) or "train" not in splits:
            return {}
    outside = [file.path for file in files if file.path not in found]
    if outside:
        folders = any(place.name.endswith("/") for place in found.values())
        # Without training texts, "test" is a word of a title.
        if not folders and all(place.split != "train" for place in found.values()):
            return {}
        # The splits of other files would contradict the names.
        raise ValueError(
            f"{root} has files with a split in their names and files without one, for "
            f"example {next(iter(found))} and {outside[0]}; give a split to all of "
            "them, or to none"
        )
    _require_one_name(root, found.values())
    return found


def _require_one_name(root: AnyPath, places: Iterable[_Place]) -> None:
    """Raises ValueError where a folder has one split under two names or formats."""
    names: dict[tuple, str] = {}
    for place in places:
        # Files of several sources, such as a-train.jsonl and b-train.jsonl, are one.
        prefix = "" if place.name.endswith("/") else _prefix(place.name)
        first = names.setdefault((place.within, place.split, prefix), place.name)
        if first != place.name:
            where = "/".join((str(root), *place.within))
            raise ValueError(
                f"{where} has the split {place.split!r} twice, as {first} and "
                f"{place.name}: keep one, or give its path"
            )


def _prefix(name: str) -> str:
    found = re.match(rf"(.*[-_.])?({'|'.join(SPLIT_NAMES)})(?![a-z])", name)
    return (found and found[1]) or ""


def _split_notes(places: dict[str, _Place]) -> list[str]:
    """Lines that name the files of each split."""
    named = collections.Counter(
        (place.split, "/".join((*place.within, place.name)))
        for place in places.values()
    )
    return [
        f"{split} is {', '.join(name for s, name in sorted(named) if s == split)}"
        for split in SPLITS
        if split in {s for s, _ in named}
    ]


def _missing_notes(files: Sequence[_File]) -> list[str]:
    """Lines that say which numbered files are not all there."""
    counts = collections.Counter(
        (*file.parts[:-1], *found.groups())
        for file in files
        if (found := _NUMBERED.fullmatch(file.parts[-1]))
    )
    return [
        f"{'/'.join((*within, before))}*-of-{total}{after}: {count:,} of "
        f"{int(total):,} files are there"
        for (*within, before, total, after), count in counts.items()
        if count < int(total)
    ]


def _kind(file: _File, place: _Place | None) -> str:
    folders = file.parts[:-1] if place is None else (*place.after, *place.within)
    # Hubs have all files of a data set in a folder "data".
    return next((name for name in folders if name != "data"), "text")


def _only_file(path: AnyPath) -> _File:
    if is_bucket(path):
        (entry,) = (
            entry
            for name, entry in Bucket(path.parent).entries().items()
            if name == path.name
        )
        return _File(str(path), (path.name,), entry.size, entry.checksum)
    status = os.stat(path)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return _File(str(path), (path.name,), status.st_size, times)


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
    known: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        folders.sort()
        status = os.stat(folder)
        # Links may lead to a folder twice, or to one around them.
        if (status.st_dev, status.st_ino) in known:
            folders.clear()
            continue
        known.add((status.st_dev, status.st_ino))
        within = Path(folder).relative_to(root).parts
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:  # a link to nothing
                files.append(_File(path, (*within, name), _GONE, ()))
                continue
            if stat.S_ISREG(status.st_mode):
                times = (status.st_mtime_ns, status.st_ctime_ns)
                files.append(_File(path, (*within, name), status.st_size, times))
    return sorted(files, key=lambda file: file.parts)


def _refuse(error: OSError) -> NoReturn:
    """A folder that cannot be read is not left out in silence."""
    raise error


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
