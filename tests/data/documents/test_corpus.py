"""The embedded corpus: files, splits and tokenizer."""

import hashlib
import json
import lzma
from importlib import resources

import pytest

from memjax.data.documents import sources, tokenizer
from tests.data.documents import tokenizer_training

CORPUS = resources.files("memjax.data") / "corpus"
MANIFEST = json.loads((CORPUS / "MANIFEST.json").read_text("utf-8"))["documents"]
KINDS = {"prose", "proofs", "code", "manuals"}
SPLITS = {"train", "validation", "test"}


def test_every_kind_is_in_every_split():
    pairs = {(entry["kind"], entry["split"]) for entry in MANIFEST}
    assert pairs == {(kind, split) for kind in KINDS for split in SPLITS}


def test_train_is_the_largest_split():
    size = {s: sum(e["bytes"] for e in MANIFEST if e["split"] == s) for s in SPLITS}
    assert size["train"] > size["validation"] + size["test"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_files_match_the_manifest(entry):
    content = lzma.decompress((CORPUS / entry["file"]).read_bytes())
    assert len(content) == entry["bytes"]
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert entry["licence"] and entry["source"]


def test_nothing_ships_outside_the_manifest():
    listed = {entry["file"] for entry in MANIFEST}
    extra = {"MANIFEST.json", "LICENSES.md", tokenizer.SHIPPED_FILE}
    assert {file.name for file in CORPUS.iterdir()} == listed | extra


def test_no_text_is_in_two_splits():
    documents = sources.open_documents("embedded")
    names = {d.name for d in documents}
    texts = {hashlib.sha256(d.text.encode()).digest() for d in documents}
    assert len(names) == len(texts) == len(documents) == 14


@pytest.mark.slow
def test_every_document_is_long():
    encode = tokenizer.load_tokenizer("bpe4k").encode
    for document in sources.open_documents("embedded"):
        # Not all of it, which takes seconds: what follows has tokens of its own.
        assert len(encode(document.text[:150_000])) > 32_768, document.name


def test_notices_of_every_licence_ship():
    notices = (CORPUS / "LICENSES.md").read_text("utf-8")
    for words in ("John Harrison", "SymPy Development Team", "Julia Silge", "PYTHON"):
        assert words in notices


@pytest.mark.slow
def test_shipped_tokenizer_is_trained_on_the_train_split():
    train = [d.text for d in sources.open_documents("embedded") if d.split == "train"]
    shipped = lzma.decompress((CORPUS / tokenizer.SHIPPED_FILE).read_bytes())
    assert tokenizer_training.train_tokenizer(train, 4096) == shipped.decode("utf-8")


def test_a_damaged_installation_is_named(monkeypatch, tmp_path):
    entry = dict(MANIFEST[0], sha256="0" * 64)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "MANIFEST.json").write_text(json.dumps({"documents": [entry]}))
    (folder / entry["file"]).write_bytes((CORPUS / entry["file"]).read_bytes())
    monkeypatch.setattr(sources.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=entry["file"]):
        sources.open_documents("embedded")
