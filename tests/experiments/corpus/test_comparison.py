"""The corpus of the studies: splits and digests; nothing is downloaded."""

import io
import os
import tarfile

import pytest

from experiments.corpus import sources
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


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """Makes a package of HOL Light with these members."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    programs = {"apt-get": 'touch "$2.deb"', "dpkg-deb": f"cat {tmp_path}/data.tar"}
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    def make(members):
        with tarfile.open(tmp_path / "data.tar", "w") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(f"{HOL}{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

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


def test_archives_that_reach_outside_are_refused(debian, tmp_path):
    (tmp_path / "deep").mkdir()
    debian({"../../../../evil": b"x"})
    with pytest.raises(ValueError, match="package.tar: refused member .*evil"):
        sources.unpack(SOURCES["hol_light"], tmp_path / "deep")
    assert not (tmp_path / "evil").exists()
