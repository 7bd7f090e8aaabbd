"""Checkpoints in a bucket, with the guarantees of those on a disk.

Objects cannot be renamed, so that a checkpoint is written under its own step:

    500/state/..., 500/record/...   as on a disk
    500/digests.json                size and checksum of each of them, as the store
                                    itself reports them
    500/commit_success.txt          the last: a step without it was cut short, is never
                                    read, and is removed by the next save

On `gs://` the checkpoint library writes and reads the bucket, every process its own
part. It does not know `s3://`: there one process writes to a temporary folder, which is
then copied.

A bucket has no locks either. The claim on the run's folder keeps other runs out.
"""

import errno
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from memjax.buckets.bucket import Bucket
from memjax.checks import short
from memjax.config_io import AnyPath, parse_json
from memjax.training.checkpoints.checksums import DIGEST_FILE
from memjax.training.checkpoints.folder import FORMAT, FORMAT_FILE, NEEDED, Folder

#: The checkpoint library's own mark on a bucket.
COMMITTED = "commit_success.txt"


class BucketFolder(Folder):
    """A folder in a bucket; see `Folder`.

    Raises:
        ValueError: also on `s3://` with several processes.
    """

    def __init__(self, path: AnyPath):
        super().__init__(path)
        self._bucket = Bucket(path)
        self._copies = self._bucket.url.startswith("s3:")
        self._temporary: Path | None = None
        if self._copies and jax.process_count() > 1:
            raise ValueError(
                f"{path} must be on gs:// or a shared filesystem with "
                f"{jax.process_count()} processes: one process writes to s3://"
            )
        names = {name.split("/")[0] for name in self._bucket.entries()}
        if names:
            self._require_marker(names)
            self._require_format(self._json(FORMAT_FILE))

    def steps(self) -> list[int]:
        """Completely saved steps, oldest first; damaged ones included."""
        return _saved(self._bucket.entries())

    def place(self, step: int) -> AnyPath:
        """Path in the bucket, or in the temporary folder of `s3://`."""
        return (self._staging() if self._copies else self.path) / str(step)

    def bring(self, step: int) -> None:
        """Downloads a step of `s3://`."""
        if not self._copies or self.place(step).exists():
            return
        partial = self._staging() / f"{step}.partial"
        names = self._bucket.entries(str(step))
        self._bucket.download(names, partial, below=str(step))
        partial.rename(self.place(step))

    def seal(self, step: int) -> None:
        """Runs in the writer's thread, once all of a step but its mark is written."""
        if self._copies:
            self._upload(step, self._staging())
        entries = {
            name.removeprefix(f"{step}/"): entry
            for name, entry in self._bucket.entries(str(step)).items()
        }
        for name in NEEDED:
            if name not in entries:
                raise OSError(errno.EIO, f"{self.path}/{step}/{name} was not written")
        # As on a disk, files directly in the folder are not covered.
        record = {n: list(entry) for n, entry in entries.items() if "/" in n}
        self._bucket.write(f"{step}/{DIGEST_FILE}", json.dumps(record).encode())
        if self._copies:
            self._bucket.write(f"{step}/{COMMITTED}", b"")

    def _upload(self, step: int, staging: Path) -> None:
        # The checkpoint library still has it under a temporary name.
        (folder,) = staging.glob(f"{step}.*")
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        self._bucket.upload(folder, names, below=str(step))

    def is_saved(self, step: int) -> bool:
        """Whether a step is in the bucket; removes its local copy."""
        if not self._copies:
            return True
        if not self.place(step).exists():
            return False
        self._clear()
        return True

    def discard(self, step: int) -> None:
        """Removes the local copy; the next save removes partial objects."""
        self._clear()

    def require_room(self, size: int) -> None:
        """No-op: the room in a bucket is unknown."""

    def unlock(self) -> None:
        """Removes the temporary folder."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _take(self) -> None:
        self._clear()
        names = self._bucket.entries()
        saved = set(map(str, _saved(names)))
        self._bucket.delete(
            name
            for name in names
            if (step := name.split("/")[0]).isdecimal() and step not in saved
        )

    def _exists(self, step: int) -> bool:
        return step in self.steps()

    def _problems(self, step: int) -> list[str]:
        """Compares sizes and checksums of the store, without a download."""
        try:
            record = self._json(f"{step}/{DIGEST_FILE}")
            items = {str(n): (int(size), str(c)) for n, (size, c) in record.items()}
        except FileNotFoundError:
            return [f"{DIGEST_FILE} is missing"]
        except (ValueError, TypeError, AttributeError) as error:
            return [f"{DIGEST_FILE} cannot be read ({short(error)})"]
        if not items:
            return [f"{DIGEST_FILE} lists no files"]
        found = self._bucket.entries(str(step))
        wrong = []
        for name, (size, checksum) in items.items():
            entry = found.get(f"{step}/{name}")
            if entry is None:
                wrong.append(f"{short(name)} is missing")
            elif entry.size != size:
                wrong.append(f"{name} has {entry.size} bytes, {size} were written")
            elif entry.checksum != checksum:
                wrong.append(f"{name} differs from what was written (checksum)")
        return wrong

    def _delete(self, step: int) -> None:
        # Without its mark it does not count, and the next save removes it.
        names = self._bucket.entries(str(step))
        self._bucket.delete([f"{step}/{COMMITTED}", *names])

    def _set_aside(self, step: int) -> str:
        taken = {name.split("/")[0] for name in self._bucket.entries()}
        aside, n = f"{step}.damaged", 1
        while aside in taken:
            n += 1
            aside = f"{step}.damaged-{n}"
        # The mark goes last: a kill leaves the step damaged, and this is done again.
        mark = f"{step}/{COMMITTED}"
        names = sorted(self._bucket.entries(str(step)), key=lambda n: n == mark)
        for name in names:
            self._bucket.move(name, f"{aside}/{name.removeprefix(f'{step}/')}")
        return aside

    def _write_format(self) -> None:
        if FORMAT_FILE not in self._bucket.entries():
            self._bucket.write(FORMAT_FILE, json.dumps(FORMAT).encode())

    def _json(self, name: str) -> Any:
        return parse_json(self._bucket.read(name), f"{self.path}/{name} is")

    def _staging(self) -> Path:
        """Temporary folder for uploads and downloads of `s3://`."""
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="memjax-checkpoints-"))
        return self._temporary

    def _clear(self) -> None:
        for folder in self._temporary.iterdir() if self._temporary else ():
            shutil.rmtree(folder, ignore_errors=True)


def _saved(names: Iterable[str]) -> list[int]:
    """Steps with their mark, oldest first."""
    parts = (PurePosixPath(name).parts for name in names)
    marked = (part[0] for part in parts if part[1:] == (COMMITTED,))
    return sorted(int(step) for step in marked if step.isdecimal())
