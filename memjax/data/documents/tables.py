"""Documents from tables with a text column: tensorflow-datasets, Hugging Face."""

import difflib
import functools
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memjax.checks import listed, short
from memjax.config_io import read_json
from memjax.data.documents.documents import SPLITS, Document, Source, Split
from memjax.data.documents.folder import files_version

_LOG = logging.getLogger(__name__)
_TEXT_KEYS = ("text", "book_text", "content", "document", "article")
_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}


def tfds_source(
    name: str, data_dir: str | None = None, text_key: str | None = None
) -> Source:
    """The documents of a tensorflow-datasets builder, without TensorFlow.

    An unprepared dataset is downloaded and prepared as array_record. A prepared folder
    names the Python classes of its features, which tfds imports: it may name classes
    of tensorflow_datasets alone.

    Args:
        name: a builder's name, or the folder of a prepared dataset.
        data_dir: tfds's data folder; None means tfds's default (TFDS_DATA_DIR).
        text_key: the feature with the text; None takes the first present of "text",
          "book_text", "content", "document", "article".

    Raises:
        ValueError: unknown name, no such feature, or stored in a format that needs
          TensorFlow.
        ImportError: tensorflow-datasets is not installed.
    """
    tfds = _import("tensorflow_datasets", "tensorflow-datasets")
    builder = _tfds_builder(tfds, name, data_dir)
    key = _text_key(list(builder.info.features), text_key, f"tfds:{name}")
    try:
        tables = {part: _tfds_texts(builder, part, key) for part in builder.info.splits}
    except NotImplementedError as error:
        raise ValueError(f"tfds:{name}: {error}") from error
    folder = Path(str(builder.data_dir))
    return _from_tables(tables, name, files_version(folder))


def huggingface_source(name: str, text_key: str | None = None) -> Source:
    """The documents of a Hugging Face dataset; runs none of its code.

    Args:
        name: "NAME" or "NAME:CONFIG", as `datasets.load_dataset` takes them.
        text_key: as for `tfds_source`.

    Raises:
        ValueError: no such dataset or feature.
        ImportError: the `datasets` package is not installed.
    """
    datasets = _import("datasets", "datasets")
    dataset_name, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(dataset_name, config or None)
    except (OSError, ValueError) as error:
        raise ValueError(f"hf:{name}: {error}") from error
    tables = {}
    for part, table in loaded.items():
        key = _text_key(list(table.column_names), text_key, f"hf:{name}")
        tables[part] = functools.partial(_column, table, key)
    # `datasets` derives a fingerprint from the files that it has loaded.
    prints = [getattr(table, "_fingerprint", None) for table in loaded.values()]
    known = None not in prints
    version = hashlib.sha256(repr((*tables, *prints)).encode()).hexdigest()
    return _from_tables(tables, name, version if known else None)


def _column(table: Any, key: str) -> Iterator[str]:
    return (row[key] for row in table)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this source needs the package {package}: pip install 'memjax[data]'"
        ) from error


def _text_key(features: list[str], text_key: str | None, where: str) -> str:
    wanted = _TEXT_KEYS if text_key is None else (text_key,)
    for key in wanted:
        if key in features:
            return key
    raise ValueError(
        f"{where}: text_key={text_key!r} matches no feature; it has {listed(features)}"
    )


def _tfds_builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    folder = Path(name).expanduser()
    if (folder / "dataset_info.json").is_file():
        _require_own_classes(folder)
        return tfds.builder_from_directory(str(folder))
    if name.startswith(("/", ".", "~")):
        raise ValueError(f"tfds:{name} is not a prepared folder: no dataset_info.json")
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"tfds:{name}: tfds knows no such dataset{hint}") from error
    builder.download_and_prepare()
    return builder


def _require_own_classes(folder: Path) -> None:
    """Refuses features whose classes tfds would import from elsewhere."""
    file = folder / "features.json"
    pending = [read_json(file)] if file.exists() else []
    while pending:
        found = pending.pop()
        if isinstance(found, list):
            pending += found
        if not isinstance(found, dict):
            continue
        pending += found.values()
        for key in ("type", "pythonClassName", "python_class_name"):
            name = found.get(key)
            if isinstance(name, str) and not name.startswith("tensorflow_datasets."):
                raise ValueError(
                    f"{file}: {key}={short(name)} must be a class of "
                    "tensorflow_datasets: any other would be imported"
                )


def _tfds_texts(builder: Any, part: str, key: str) -> Callable[[], Iterator[str]]:
    # Opened here, so that a wrong format is refused early.
    rows = builder.as_data_source(split=part)
    return lambda: (rows[i][key].decode("utf-8") for i in range(len(rows)))


def _from_tables(
    tables: Mapping[str, Callable[[], Iterator[str]]], name: str, version: str | None
) -> Source:
    """A source of tables, with their splits if there are more than train."""
    named = {_SPLIT_NAMES.get(part): part for part in tables}
    if None in named:
        other = [part for part in tables if part not in _SPLIT_NAMES]
        _LOG.warning("%s: splits %s are not used", name, other)
    parts: list[Split] = [s for s in SPLITS if s in named]
    if not parts:
        raise ValueError(f"{name}: has splits {listed(tables)}, none of {SPLITS}")
    has_splits = parts != ["train"]

    def read(split: Split | None) -> Iterator[Document]:
        for part in parts:
            if not has_splits or split in (None, part):
                yield from _table_documents(tables[named[part]](), name, part)

    return Source(read, has_splits, version)


def _table_documents(
    texts: Iterator[str], name: str, split: Split
) -> Iterator[Document]:
    empty = 0
    for index, text in enumerate(texts):
        if text:
            yield Document(f"{split}/{index}", name, split, text)
        else:
            empty += 1
    if empty:
        _LOG.warning("%s, %s: %d empty rows left out", name, split, empty)
