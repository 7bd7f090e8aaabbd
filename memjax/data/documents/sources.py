"""Where documents come from: the embedded corpus, a folder, tfds, Hugging Face."""

import difflib
import hashlib
import importlib
import json
import logging
import lzma
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from memjax.data.documents.documents import SPLITS, Document, Split, assign_splits
from memjax.data.documents.folder import folder_documents

_LOG = logging.getLogger(__name__)
_FORMS = ("embedded", "folder:PATH", "tfds:NAME", "hf:NAME")
_TEXT_KEYS = ("text", "book_text", "content", "document", "article")
_SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}


def open_documents(spec: str) -> list[Document]:
    """Returns every document of a source.

    Args:
        spec: "embedded"; "folder:PATH"; "tfds:NAME", a tensorflow-datasets name such as
          `pg19` or `lm1b` (`wiki40b/en` too, where tfds can build it without
          TensorFlow), or the folder of a prepared one; "hf:NAME" or "hf:NAME:CONFIG",
          a Hugging Face dataset.

    Raises:
        ValueError: another form of spec, or a source that cannot be read.
        ImportError: the source needs a package that is not installed.
    """
    return list(iterate_documents(spec))


def iterate_documents(spec: str, split: Split | None = None) -> Iterator[Document]:
    """Yields the documents of `spec` (as `open_documents`), of one split if named.

    Sources that bring their own splits are read one document at a time.
    """
    form, _, name = spec.partition(":")
    if spec == "embedded":
        found: Iterable[Document] = embedded_documents()
    elif form == "folder" and name:
        found = folder_documents(Path(name))
    elif form == "tfds" and name:
        found = tfds_documents(name, split)
    elif form == "hf" and name:
        found = huggingface_documents(name, split)
    else:
        near = difflib.get_close_matches(spec, _FORMS, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"source={spec!r} must be one of {', '.join(_FORMS)}{hint}")
    return (d for d in found if split is None or d.split == split)


def embedded_documents() -> list[Document]:
    """Returns the 14 documents that ship with memjax, 1.7M `bpe4k` tokens.

    Four kinds (prose, proofs, code, manuals), each in each split. Licences are in
    `memjax/data/corpus/MANIFEST.json` and `LICENSES.md`.

    Raises:
        ValueError: a file of the installation does not match its digest.
    """
    corpus = resources.files("memjax.data") / "corpus"
    manifest = json.loads((corpus / "MANIFEST.json").read_text("utf-8"))
    documents = []
    for entry in manifest["documents"]:
        content = lzma.decompress((corpus / entry["file"]).read_bytes())
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{corpus / entry['file']} does not match its manifest")
        name = entry["file"].removesuffix(".txt.xz")
        text = content.decode("utf-8")
        documents.append(Document(name, entry["kind"], entry["split"], text))
    return documents


def tfds_documents(
    name: str,
    split: Split | None = None,
    data_dir: str | None = None,
    text_key: str | None = None,
) -> Iterator[Document]:
    """Yields the documents of a tensorflow-datasets builder, without TensorFlow.

    An unprepared dataset is downloaded and prepared as array_record. A prepared folder
    names the Python classes of its features and tfds imports them: open only folders
    that you trust.

    Args:
        name: a builder's name, or the folder of a prepared dataset.
        split: yield only this one.
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
    return _from_tables(tables, name, split)


def huggingface_documents(
    name: str, split: Split | None = None, text_key: str | None = None
) -> Iterator[Document]:
    """Yields the documents of a Hugging Face dataset; runs none of its code.

    Args:
        name: "NAME" or "NAME:CONFIG", as `datasets.load_dataset` takes them.
        split, text_key: as for `tfds_documents`.

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
        tables[part] = (row[key] for row in table)
    return _from_tables(tables, name, split)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this source needs the package {package}: pip install {package}"
        ) from error


def _text_key(features: list[str], text_key: str | None, where: str) -> str:
    wanted = _TEXT_KEYS if text_key is None else (text_key,)
    for key in wanted:
        if key in features:
            return key
    raise ValueError(
        f"{where}: text_key={text_key!r} matches no feature; it has {features}"
    )


def _tfds_builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    folder = Path(name).expanduser()
    if (folder / "dataset_info.json").is_file():
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


def _tfds_texts(builder: Any, part: str, key: str) -> Iterator[str]:
    # The record file is opened now, so that a wrong format is refused early.
    source = builder.as_data_source(split=part)
    return (source[i][key].decode("utf-8") for i in range(len(source)))


def _from_tables(
    tables: dict[str, Iterator[str]], name: str, split: Split | None
) -> Iterator[Document]:
    """Yields documents; the tables' own splits count if there is more than train."""
    named = {_SPLIT_NAMES.get(part): part for part in tables}
    if None in named:
        other = [part for part in tables if part not in _SPLIT_NAMES]
        _LOG.warning("%s: splits %s are not used", name, other)
    parts: list[Split] = [s for s in SPLITS if s in named]
    if not parts:
        raise ValueError(f"{name}: has splits {list(tables)}, none of {SPLITS}")
    if parts == ["train"]:
        whole = list(_table_documents(tables[named["train"]], name, "train"))
        return iter(assign_splits(whole))
    return (
        document
        for part in parts
        if split is None or part == split
        for document in _table_documents(tables[named[part]], name, part)
    )


def _table_documents(
    texts: Iterable[str], name: str, split: Split
) -> Iterator[Document]:
    empty = 0
    for index, text in enumerate(texts):
        if text:
            yield Document(f"{split}/{index}", name, split, text)
        else:
            empty += 1
    if empty:
        _LOG.warning("%s, %s: %d empty rows left out", name, split, empty)
