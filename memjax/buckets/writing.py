"""Writing to folders that somebody else may have filled.

A name in such a folder can be a link to any file, a pipe or a device. Only regular
files with one name are opened. Whole files are written under a new random name and then
moved, which replaces a link and not its target.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from memjax.buckets.bucket import Bucket
from memjax.config_io import AnyPath


def open_regular(file: Path, flags: int) -> int:
    """The descriptor of a regular file, opened with the flags of `os.open`.

    Raises:
        ValueError: it is a link, has another name, or is a pipe, socket or device.
        OSError: it cannot be opened.
    """
    refused = f"{file} must be a regular file of one name, and no link"
    try:
        # A pipe would wait for its other end.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        found = os.open(file, flags, 0o666)
    except OSError as error:
        # A link; a pipe or a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(refused) from None
        raise
    status = os.fstat(found)
    # Another name may be in any folder, as a link's target.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(found)
        raise ValueError(refused)
    return found


@contextlib.contextmanager
def replaced(file: AnyPath) -> Iterator[BinaryIO]:
    """A stream to a new file that replaces `file` at the end; not after an exception.

    Raises:
        OSError: it cannot be written; the file before is untouched.
    """
    if not isinstance(file, Path):
        # An object appears with all of its content.
        content = io.BytesIO()
        yield content
        Bucket(file.parent).write(file.name, content.getvalue())
        return
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # After the sync: a rename may reach the disk before the data does.
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno:
            # Of a write to an open file, which names none.
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
    sync_folder(file.parent)


def write_atomically(file: AnyPath, text: str) -> None:
    """Writes a small file as `replaced`, in UTF-8."""
    with replaced(file) as stream:
        stream.write(text.encode("utf-8"))


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write in, renamed to `folder` when all is on the disk.

    Raises:
        ValueError: if `folder` is not empty.
    """
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_remains(folder)
    # Beside the destination, as a rename does not cross filesystems.
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}{UNFINISHED}")
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    try:
        # Held while this process lives; without locks nothing is ever cleared.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
        for file in filter(Path.is_file, temporary.rglob("*")):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(temporary)
        # After the sync: a kill leaves a whole folder under this name, or none.
        temporary.replace(folder)
        sync_folder(folder.parent)
    except BaseException:
        # Renamed already, if only its parent could not be synced.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


#: End of the name of a temporary folder: no other program's folder is taken for one.
UNFINISHED = ".memjax-unfinished"


def unfinished_of(folder: str) -> re.Pattern[str]:
    """The names of temporary folders of `atomic_folder`, by a pattern of its folder."""
    return re.compile(rf"\.{folder}\.[0-9a-f]{{16}}{re.escape(UNFINISHED)}")


def require_free(folder: Path) -> None:
    """Raises ValueError unless a folder can be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and is not an empty folder")


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk, where the file system can.

    Without it a power cut within seconds may undo a rename.
    """
    # Some network filesystems cannot, and lose nothing by it that they kept before.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _clear_remains(folder: Path) -> None:
    """Removes temporary folders of killed writers of `folder`."""
    own = unfinished_of(re.escape(folder.name))
    for remains in folder.parent.iterdir():
        if not own.fullmatch(remains.name):
            continue
        # A lock that can be had is held by nobody who still writes there.
        with contextlib.suppress(OSError):
            lock = os.open(remains, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(remains)
            finally:
                os.close(lock)
