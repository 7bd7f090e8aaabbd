"""Sources of documents: the embedded corpus, files, tfds, Hugging Face."""

import dataclasses
import difflib
import hashlib
import json
import lzma
from collections.abc import Iterator
from importlib import resources

from memjax.buckets.bucket import as_path, is_bucket
from memjax.checks import require_instance
from memjax.config_io import AnyPath
from memjax.data.documents import prepared
from memjax.data.documents.documents import Document, Source, Split, assign_splits
from memjax.data.documents.folder import files_source
from memjax.data.documents.joined import check_join, join_rows
from memjax.data.documents.tables import huggingface_source, tfds_source

_FORMS = ("embedded", "PATH", "folder:PATH", "tfds:NAME", "hf:NAME", "prepared:FOLDER")


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Settings that turn rows of a source into documents.

    Attributes:
        column: key or column with the text; None takes the first present of "text",
            "book_text", "content", "document", "article".
        join: None, each row is a document; "N", that many rows are; "blank", rows up to
            an empty one; "articles", rows from one title to the next, `= Title =`, as
            in WikiText-103. The rows of a text file are its lines.
    """

    column: str | None = None
    join: str | None = None

    def __post_init__(self):
        for name in ("column", "join"):
            if getattr(self, name) is not None:
                require_instance(name, getattr(self, name), str)
        check_join(self.join)
        if self.column == "":
            raise ValueError("column must be a name, got ''")


#: Each row is a document.
ROWS = RowConfig()


def open_documents(spec: str, rows: RowConfig = ROWS) -> list[Document]:
    """Returns every document of a source; empty texts are left out.

    Args:
        spec: "embedded"; the path of a file or a folder, or "folder:PATH" whatever its
            name; "tfds:NAME", a tensorflow-datasets name such as `pg19` or `lm1b`
            (`wiki40b/en` too, where tfds can build it without TensorFlow), or the
            folder of a prepared one; "hf:NAME", "hf:NAME:CONFIG" or
            "hf:NAME:CONFIG:SPLIT", a Hugging Face dataset: see `huggingface_source`.
        rows: see `RowConfig`.

    Raises:
        ValueError: another form of spec, or a source that cannot be read.
        ImportError: the source needs a package that is not installed.
    """
    source = open_source(spec, rows)
    documents = [document for document in source.read(None) if document.text]
    return documents if source.has_splits else assign_splits(documents)


def prepared_folder(spec: str) -> AnyPath | None:
    """The folder of "prepared:FOLDER", None of any other source."""
    form, _, name = spec.partition(":")
    return as_path(name) if form == prepared.FORM and name else None


def splits_of(spec: str, rows: RowConfig = ROWS) -> set[Split]:
    """The splits that have documents.

    Raises:
        ValueError: as `open_documents`.
    """
    if (folder := prepared_folder(spec)) is not None:
        return set(prepared.read_manifest(folder)["shards"])
    return {document.split for document in open_documents(spec, rows)}


def check_source(spec: str, rows: RowConfig = ROWS) -> tuple[str, ...]:
    """The notes of a source; reads no document.

    Raises:
        ValueError: the source cannot be opened.
    """
    if (folder := prepared_folder(spec)) is None:
        return open_source(spec, rows).notes
    if rows != ROWS:
        raise ValueError(
            f"source={spec!r} has tokens already: give {rows} to memjax data prepare"
        )
    prepared.read_manifest(folder)
    return ()


def open_source(spec: str, rows: RowConfig = ROWS) -> Source:
    """Opens a source, as for `open_documents`; reads no document."""
    require_instance("source", spec, str)
    form, _, name = spec.partition(":")
    if prepared_folder(spec) is not None:
        raise ValueError(f"source={spec!r} has tokens, and the texts are needed here")
    if spec == "embedded":
        if rows != ROWS:
            raise ValueError(f"source='embedded' has whole documents, got {rows}")
        return embedded_source()
    if form == "tfds" and name:
        source = tfds_source(name, text_key=rows.column)
    elif form == "hf" and name:
        source = huggingface_source(name, rows.column)
    elif form == "folder" and name:
        source = files_source(name, rows.column, by_line=rows.join is not None)
    # An empty path would be the current folder.
    elif is_bucket(spec) or (spec and as_path(spec).exists()):
        source = files_source(spec, rows.column, by_line=rows.join is not None)
    else:
        near = difflib.get_close_matches(spec, _FORMS, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"source={spec!r} is no path, and none of {', '.join(_FORMS)}{hint}"
        )
    return source if rows.join is None else join_rows(source, rows.join)


def embedded_source() -> Source:
    """The 14 documents that ship with memjax, 1.7M `bpe4k` tokens.

    Four kinds (prose, proofs, code, manuals), each in each split. Licences are in
    `memjax/data/corpus/MANIFEST.json` and `LICENSES.md`.

    Raises:
        ValueError: from `read`: a file of the installation does not match its digest.
    """
    corpus = resources.files("memjax.data") / "corpus"
    # The manifest holds every text's digest.
    manifest = (corpus / "MANIFEST.json").read_bytes()

    def read(split: Split | None) -> Iterator[Document]:
        for entry in json.loads(manifest)["documents"]:
            if split not in (None, entry["split"]):
                continue
            content = lzma.decompress((corpus / entry["file"]).read_bytes())
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise ValueError(
                    f"{corpus / entry['file']} does not match its manifest"
                )
            name = entry["file"].removesuffix(".txt.xz")
            text = content.decode("utf-8")
            yield Document(name, entry["kind"], entry["split"], text)

    return Source(read, True, hashlib.sha256(manifest).hexdigest())
