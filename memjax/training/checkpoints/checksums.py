"""SHA-256 digests of a checkpoint's files, verified before it is read.

`write_digests` records size and SHA-256 of every file in the subfolders of a folder;
`problems` lists later changes. Files directly in the folder are not covered: orbax
rewrites timestamps there after the digests are taken, and nothing is read from them.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from memjax.buckets.writing import sync_folder, write_atomically
from memjax.checks import short
from memjax.config_io import read_json, require_regular

DIGEST_FILE = "digests.json"


def write_digests(folder: Path) -> None:
    """Writes `digests.json` for every file below `folder`, all synced to the disk."""
    files = sorted(p for p in folder.glob("*/**/*") if p.is_file())
    with ThreadPoolExecutor(8) as pool:
        entries = pool.map(_synced_entry, files)
        names = [p.relative_to(folder).as_posix() for p in files]
        record = dict(zip(names, entries, strict=True))
    # A file is found again after a power cut only if its folder is on the disk too.
    for inner in {path.parent for path in files}:
        sync_folder(inner)
    write_atomically(folder / DIGEST_FILE, json.dumps(record, indent=1))


def problems(folder: Path) -> list[str]:
    """Differences from the digests, one line per file.

    Only files inside `folder` are opened, whatever the digests name.
    """
    try:
        record = read_json(folder / DIGEST_FILE)
        items = [(str(n), int(e["bytes"]), str(e["sha256"])) for n, e in record.items()]
    except FileNotFoundError:
        return [f"{DIGEST_FILE} is missing"]
    except OSError as error:
        return [f"{DIGEST_FILE} cannot be read ({error.strerror})"]
    # It is JSON, and something else than a record of digests.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return [f"{DIGEST_FILE} cannot be read ({short(error)})"]
    if not items:
        # Nothing to check is no proof: a truncated record must not pass.
        return [f"{DIGEST_FILE} lists no files"]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda item: _problem(folder, *item), items)
        return [text for text in found if text]


def _synced_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _problem(folder: Path, name: str, size: int, digest: str) -> str | None:
    plain = PurePosixPath(name)
    # A digest file may be damaged or forged: it must not lead outside of its folder.
    if plain.is_absolute() or ".." in plain.parts:
        return f"{DIGEST_FILE} names {short(name)}, which is outside the checkpoint"
    try:
        require_regular(folder / name)
        with (folder / name).open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            # A file of another size is found out without reading it.
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} differs from what was written (sha256)"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except ValueError as error:
        # A name with a zero byte, or a pipe.
        return f"{short(name)} cannot be read ({short(error)})"
    return None
