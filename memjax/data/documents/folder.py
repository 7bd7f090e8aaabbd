"""Documents from a folder of text, Markdown, JSONL or parquet files."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memjax.data.documents.documents import SPLITS, Document, Split, assign_splits

_LOG = logging.getLogger(__name__)


def folder_documents(path: Path) -> list[Document]:
    """Returns the documents of a folder, sub-folders included, in order of name.

    `.txt` and `.md` files are one document each; `.jsonl` has one JSON object a line
    with a "text" string; `.parquet` has a "text" column. Other files are left alone
    and counted in the log. If every file lies under a folder named train, validation
    or test, those are the splits; otherwise `assign_splits` decides. The kind is the
    name of the (next) sub-folder, or "text" for files that lie in none.

    Raises:
        ValueError: no such folder, nothing readable in it, only some files under split
          folders, or a file is malformed or holds an empty text (named, with the line).
        ImportError: a parquet file is there and pyarrow is not.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ValueError(f"path={str(path)!r} is not a folder")
    files = _readable_files(root)
    parts = [file.relative_to(root).parts for file in files]
    by_folder = [len(p) > 1 and p[0] in SPLITS for p in parts]
    # Files outside of split folders would get splits that the folders contradict.
    if any(by_folder) and not all(by_folder):
        raise ValueError(
            f"{root} has files inside and outside split folders, for example "
            f"{files[by_folder.index(True)]} and {files[by_folder.index(False)]}; "
            f"put all of them under {'/, '.join(SPLITS)}/, or none"
        )
    documents = [d for file in files for d in _read(file, root, all(by_folder))]
    return documents if all(by_folder) else assign_splits(documents)


def _readable_files(root: Path) -> list[Path]:
    present = sorted(file for file in root.rglob("*") if file.is_file())
    files = [file for file in present if file.suffix.lower() in _READERS]
    if not files:
        raise ValueError(
            f"path={str(root)!r} holds no file ending in {', '.join(_READERS)}"
        )
    if len(files) < len(present):
        _LOG.info("%s: %d other files left alone", root, len(present) - len(files))
    return files


def _read(file: Path, root: Path, has_split: bool) -> Iterator[Document]:
    relative = file.relative_to(root)
    folders = relative.parts[1 if has_split else 0 : -1]
    split: Split = relative.parts[0] if has_split else "train"  # pyright: ignore
    kind = folders[0] if folders else "text"
    for suffix, text in _READERS[file.suffix.lower()](file):
        _check_text(text, f"{file}{suffix}")
        yield Document(relative.as_posix() + suffix, kind, split, text)


def _read_text(file: Path) -> Iterator[tuple[str, str]]:
    content = file.read_bytes()
    try:
        yield "", content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{line}: not UTF-8 ({error.reason})") from error


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    # Bytes, as str.splitlines also breaks at characters that JSON may hold.
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not JSON ({error})") from error
        if not isinstance(record, dict) or "text" not in record:
            raise ValueError(f'{file}:{number}: needs an object with a "text" key')
        yield f":{number}", record["text"]


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(
            f"{file} needs pyarrow: pip install 'memjax[data]'"
        ) from error
    try:
        table = parquet.ParquetFile(file)
        if "text" not in table.schema_arrow.names:
            raise ValueError(
                f'{file}: no "text" column; it has {table.schema_arrow.names}'
            )
        row = 0
        for batch in table.iter_batches(columns=["text"]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield f":{row}", text
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not a readable parquet file ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{where}: text is {type(text).__name__}, not a string")
    if not text:
        raise ValueError(f"{where}: the text is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not valid Unicode ({error.reason})") from error
