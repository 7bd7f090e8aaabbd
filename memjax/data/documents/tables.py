"""Documents from tables with a text column: tensorflow-datasets, Hugging Face."""

import difflib
import functools
import hashlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memjax.checks import listed, short
from memjax.config_io import read_json
from memjax.data.documents.documents import SPLIT_NAMES, SPLITS, Document, Source, Split
from memjax.data.documents.folder import files_version
from memjax.data.documents.readers import check_text, text_column


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
    key = text_column(list(builder.info.features), text_key, f"tfds:{name}")
    try:
        tables = {part: _tfds_texts(builder, part, key) for part in builder.info.splits}
    except NotImplementedError as error:
        raise ValueError(f"tfds:{name}: {error}") from error
    folder = Path(str(builder.data_dir))
    return _from_tables(tables, name, _version(folder, key))


def huggingface_source(name: str, text_key: str | None = None) -> Source:
    """The documents of a Hugging Face dataset, streamed; runs none of its code.

    Args:
        name: "NAME" or "NAME:CONFIG", as `datasets.load_dataset` takes them, the name
            of a local folder too; or "NAME:CONFIG:SPLIT", where CONFIG may be empty and
            SPLIT is one of the dataset's, "train_sft", or its first rows,
            "train[:1000]" or "train[:1%]", or several of these, "train[:1%]+test".
            Without SPLIT, all are read. Documents of a single split are dealt out to
            train, validation and test.
        text_key: column with the text; None as for `tfds_source`.

    Raises:
        ValueError: no such dataset, split or column.
        ImportError: the `datasets` package is not installed.
    """
    datasets = _import("datasets", "datasets")
    dataset_name, config, wanted = ([*name.split(":", 2), "", ""])[:3]
    try:
        loaded = datasets.load_dataset(dataset_name, config or None, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"hf:{name}: {error}") from error
    tables = {}
    for asked in wanted.split("+") if wanted else loaded:
        part, rows = _first_rows(asked, loaded, f"hf:{name}")
        if part in tables:
            raise ValueError(f"hf:{name}: split {part!r} is asked for twice")
        columns = loaded[part].column_names or list(next(iter(loaded[part]), {}))
        key = text_column(list(columns), text_key, f"hf:{name}")
        tables[part] = functools.partial(_column, loaded[part], key, rows)
    if wanted and len(tables) == 1:
        # Whatever its name: all of it is there to train on, validate and test.
        tables = {"train": tables.popitem()[1]}
    folder = Path(dataset_name).expanduser()
    version = _version(folder, name, text_key) if folder.is_dir() else None
    return _from_tables(tables, dataset_name, version)


def _version(folder: Path, *settings: str | None) -> str | None:
    """Digest of a folder's files and of the settings of reading."""
    files = files_version(folder)
    if files is None:
        return None
    return hashlib.sha256(repr((files, *settings)).encode()).hexdigest()


def _first_rows(
    asked: str, loaded: Mapping[str, Any], where: str
) -> tuple[str, int | None]:
    """A split and the number of its first rows that are read; None is all."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[:(\d+(?:\.\d+)?)(%?)\])?", asked)
    if found is None or found[1] not in loaded:
        raise ValueError(
            f"{where}: split={asked!r} must be one of {listed(loaded)}, or its first "
            "rows, as in 'train[:1000]' or 'train[:1%]'"
        )
    part, number, percent = found.groups()
    if number is None:
        return part, None
    if not percent:
        if not number.isdigit():
            raise ValueError(f"{where}: split={asked!r} must have whole rows")
        return part, int(number)
    known = (getattr(loaded[part].info, "splits", None) or {}).get(part)
    if known is None or not known.num_examples:
        raise ValueError(
            f"{where}: split={asked!r}: the dataset does not say how many rows it has; "
            f"give a number, as in '{part}[:1000]'"
        )
    return part, round(known.num_examples * min(float(number), 100) / 100)


def _column(table: Any, key: str, rows: int | None) -> Iterator[str | None]:
    return (row[key] for row in itertools.islice(table, rows))


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this source needs the package {package}: pip install {package}"
        ) from error


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
    tables: Mapping[str, Callable[[], Iterator[str | None]]],
    name: str,
    version: str | None,
) -> Source:
    """A source of tables, with their splits if there are more than train."""
    named: dict[Split, str] = {}
    for part in tables:
        split = SPLIT_NAMES.get(part.lower())
        if split in named:
            raise ValueError(
                f"{name}: has the split {split!r} twice, as {named[split]!r} and "
                f"{part!r}: ask for one of them"
            )
        if split is not None:
            named[split] = part
    other = [part for part in tables if part not in named.values()]
    if not named:
        raise ValueError(f"{name}: has splits {listed(tables)}, none of {SPLITS}")
    has_splits = list(named) != ["train"]

    def read(split: Split | None) -> Iterator[Document]:
        for part in SPLITS:
            if part in named and (not has_splits or split in (None, part)):
                yield from _table_documents(tables[named[part]](), name, part)

    notes = [f"{split} is {part}" for split, part in named.items()]
    if other:
        notes.append(f"left out: splits {listed(other)}")
    return Source(read, has_splits, version, tuple(notes))


def _table_documents(
    texts: Iterator[str | None], name: str, split: Split
) -> Iterator[Document]:
    for index, text in enumerate(texts):
        check_text(text, f"{name}, row {index} of {split}")
        yield Document(f"{split}/{index}", name, split, text or "")
