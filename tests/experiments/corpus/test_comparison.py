"""The corpus of the comparison: fixed splits, digests, what is refused.

No package is downloaded: sources are given as folders.
"""

import dataclasses
import json
import struct
import zlib

import pytest

from experiments.corpus import comparison
from experiments.corpus.comparison import LISTED, Listed, fetch_comparison, read_listed
from experiments.corpus.comparison_sources import (
    COMPARISON_SOURCES,
    character_vectors,
    python_docs,
    python_library,
)
from experiments.corpus.plain_text_sources import Source
from memjax.data import open_documents


def test_the_documents_that_are_listed_are_those_of_the_splits():
    chosen = {
        (split, source, name)
        for split, sources in comparison.SPLITS.items()
        for source, names in sources.items()
        for name in names.split()
    }
    listed = read_listed()
    assert {(x.file.split("/")[0], x.source, x.name) for x in listed} == chosen
    assert len({x.sha256 for x in listed}) == len(listed) == len(chosen)
    test = [x.file.split("/")[1] for x in listed if x.file.startswith("test/")]
    assert {kind: test.count(kind) for kind in set(test)} == dict.fromkeys(
        ("proofs", "code", "prose"), 8
    )
    assert all(x.licence and x.package for x in listed)


@pytest.fixture
def sources(monkeypatch):
    """Two sources whose texts are here, as if they had been fetched."""
    texts = {"first": {"a/b": "one\n", "c": "two\n"}, "second": {"d": "three\n"}}
    made = {
        name: Source(
            kind,
            "installed",
            ("none",),
            "MIT",
            lambda _, found=found: iter(found.items()),
        )
        for kind, (name, found) in zip(("proofs", "code"), texts.items(), strict=True)
    }
    splits = {"train": {"first": "a/b"}, "test": {"first": "c", "second": "d"}}
    monkeypatch.setattr(comparison, "COMPARISON_SOURCES", made)
    monkeypatch.setattr(comparison, "SPLITS", splits)
    return texts


def test_documents_are_written_in_their_splits(sources, tmp_path):
    lines = []
    found = fetch_comparison(tmp_path / "out", None, lines.append)
    assert lines == ["first: 2 documents", "second: 1 documents"]
    read = open_documents(f"folder:{tmp_path}/out")
    assert {(d.split, d.kind, d.text) for d in read} == {
        ("train", "proofs", "one\n"),
        ("test", "proofs", "two\n"),
        ("test", "code", "three\n"),
    }
    manifest = json.loads((tmp_path / "out" / comparison.MANIFEST).read_text())
    assert [Listed(**x) for x in manifest["documents"]] == found
    # The same texts again are accepted.
    assert fetch_comparison(tmp_path / "out", found, lines.append) == found


def test_a_document_that_changed_is_refused(sources, tmp_path):
    found = fetch_comparison(tmp_path, None, lambda line: None)
    sources["second"]["d"] = "four\n"
    with pytest.raises(ValueError, match="test/code/second__d.txt .* not the text"):
        fetch_comparison(tmp_path, found, lambda line: None)
    assert not (tmp_path / comparison.MANIFEST).exists()
    del sources["second"]["d"]
    with pytest.raises(ValueError, match="second: installed: none holds no .* 'd'"):
        fetch_comparison(tmp_path, found, lambda line: None)


def test_an_unreachable_source_ends_the_program(sources, tmp_path, monkeypatch):
    broken = dataclasses.replace(
        COMPARISON_SOURCES["hol_light"], packages=("no-such-package",)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(comparison, "COMPARISON_SOURCES", {"first": broken})
    with pytest.raises(ValueError, match="first: unreachable: .*apt-get"):
        fetch_comparison(tmp_path, None, lambda line: None)
    assert LISTED.is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        fetch_comparison(tmp_path / "file")


def _vector(strings):
    word = lambda *numbers: struct.pack(f">{len(numbers)}i", *numbers)
    item = b"X\n" + word(3, 0x40200, 0x30500) + word(5) + b"UTF-8"
    item += word(16, len(strings))
    for text in strings:
        item += word(9, len(text)) + text.encode()
    return struct.pack(">I", len(item)) + zlib.compress(item)


def test_character_vectors_of_r():
    vectors = [["EMMA", "", "By Jane"], ["TWO"]]
    data = b"".join(map(_vector, vectors))
    assert list(character_vectors(data)) == vectors
    with pytest.raises(ValueError, match="not deflated"):
        list(character_vectors(b"abcdefgh"))
    number = _vector(["x"])[:4] + zlib.compress(
        zlib.decompress(_vector(["x"])[4:]).replace(
            struct.pack(">i", 16), b"\0\0\0\x0e"
        )
    )
    with pytest.raises(ValueError, match="vectors of strings alone"):
        list(character_vectors(number))


def test_python_sources(tmp_path):
    library = tmp_path / "usr/lib/python3.11"
    (library / "email/mime").mkdir(parents=True)
    (library / "email/mime/text.py").write_text("b = 2")
    (library / "email/__init__.py").write_text("a = 1")
    (library / "enum.py").write_text("c = 3")
    found = dict(python_library(tmp_path))
    assert found["enum.py"] == "c = 3"
    assert found["email"].startswith("# file: email/__init__.py\na = 1\n\n# file:")
    docs = tmp_path / "usr/share/doc/python3.11/html/_sources/library"
    docs.mkdir(parents=True)
    (docs / "os.rst.txt").write_text("OS")
    assert dict(python_docs(tmp_path)) == {"library/os": "OS"}
