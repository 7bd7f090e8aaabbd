"""The sources of the corpus of the comparison, beside those of the larger corpus."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from experiments.corpus.plain_text_sources import SOURCES, Source, Texts, read_text

# A flag of the first word of a character vector and of a string in R's format.
_VECTOR, _STRING = 16, 9


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
    # Links that lead out of the package are not among what was unpacked.
    for path in sorted(root.iterdir()):
        if path.suffix == ".py":
            yield path.name, read_text(path)
        elif path.is_dir() and (files := sorted(path.rglob("*.py"), key=str)):
            named = (f"# file: {_in(root, file)}\n{read_text(file)}" for file in files)
            yield path.name, "\n\n".join(named)


def character_vectors(content: bytes) -> Iterator[list[str]]:
    """The vectors of strings of an R data base (.rdb), in the order of the file.

    Each object is four bytes with its length, and R's binary format, deflated.

    Raises:
        ValueError: if an object is anything but a vector of strings.
    """
    while content:
        unpack = zlib.decompressobj()
        try:
            item = unpack.decompress(content[4:])
        except zlib.error as error:
            raise ValueError(f"R data is not deflated ({error})") from error
        content = unpack.unused_data
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


def _in(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


COMPARISON_SOURCES: dict[str, Source] = {
    **{name: SOURCES[name] for name in ("hol_light", "moby_dick")},
    "state_of_the_union": SOURCES["state_of_the_union"],
    "austen": Source(
        "prose",
        "apt",
        ("r-cran-janeaustenr",),
        "public domain; packaging MIT",
        austen,
    ),
    "python_docs": Source(
        "manuals", "apt", ("python3.11-doc",), "PSF-2.0", python_docs
    ),
    "python_library": Source(
        "code", "apt", ("libpython3.11-stdlib",), "PSF-2.0", python_library
    ),
    "python_minimal": Source(
        "code", "apt", ("libpython3.11-minimal",), "PSF-2.0", python_library
    ),
}
