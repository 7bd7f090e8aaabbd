"""Sources of documents: the embedded corpus, a folder, tfds, Hugging Face."""

import difflib
import hashlib
import json
import lzma
from collections.abc import Iterator
from importlib import resources

from memjax.buckets.bucket import as_path
from memjax.config_io import AnyPath
from memjax.data.documents import prepared
from memjax.data.documents.documents import Document, Source, Split, assign_splits
from memjax.data.documents.folder import folder_source
from memjax.data.documents.tables import huggingface_source, tfds_source

_FORMS = ("embedded", "folder:PATH", "tfds:NAME", "hf:NAME", "prepared:FOLDER")


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
    source = open_source(spec)
    documents = list(source.read(None))
    return documents if source.has_splits else assign_splits(documents)


def prepared_folder(spec: str) -> AnyPath | None:
    """The folder of "prepared:FOLDER", None of any other source."""
    form, _, name = spec.partition(":")
    return as_path(name) if form == prepared.FORM and name else None


def splits_of(spec: str) -> set[Split]:
    """The splits that have documents.

    Raises:
        ValueError: as `open_documents`.
    """
    if (folder := prepared_folder(spec)) is not None:
        return set(prepared.read_manifest(folder)["shards"])
    return {document.split for document in open_documents(spec)}


def check_source(spec: str) -> None:
    """Raises ValueError on a source that cannot be opened; reads no document."""
    if (folder := prepared_folder(spec)) is not None:
        prepared.read_manifest(folder)
    else:
        open_source(spec)


def open_source(spec: str) -> Source:
    """Opens a source, as for `open_documents`; reads no document."""
    form, _, name = spec.partition(":")
    if spec == "embedded":
        return embedded_source()
    if form == "folder" and name:
        return folder_source(name)
    if form == "tfds" and name:
        return tfds_source(name)
    if form == "hf" and name:
        return huggingface_source(name)
    if prepared_folder(spec) is not None:
        raise ValueError(f"source={spec!r} has tokens, and the texts are needed here")
    near = difflib.get_close_matches(spec, _FORMS, 1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"source={spec!r} must be one of {', '.join(_FORMS)}{hint}")


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
