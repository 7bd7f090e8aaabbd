"""Calls to the store behind a URL: waited for in bounded time, with errors of one line.

The stores' libraries repeat requests that fail, for half a minute or so.
"""

import asyncio
import errno
import logging
import re
from typing import Any

from fsspec.asyn import sync
from fsspec.callbacks import Callback

from memjax.checks import short

#: Seconds without progress after which a call says that it waits, and gives up.
WAITING, GIVING_UP = 20.0, 180.0
#: What stores say where credentials are missing, have expired, or allow too little. An
#: answer without content, as S3 gives for expired ones, is a "Bad Request".
_REFUSALS = re.compile(
    r"\b40[13]\b|forbidden|denied|credential|expired|unauthorized|bad request"
    r"|unauthenticated|invalidaccesskey|signaturedoesnotmatch",
    re.IGNORECASE,
)
#: What TensorStore says then; an object that is missing is 404.
_FAILURES = re.compile(
    r"http_response_code='(?!404)|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED"
    r"|UNAUTHENTICATED"
)

logger = logging.getLogger(__name__)


class Store:
    """The store of a scheme, with credentials from the environment.

    Args:
        scheme: "gs" or "s3".

    Raises:
        ValueError: its package is not installed.
    """

    def __init__(self, scheme: str):
        self._files, self._has_warned = _filesystem(scheme), False

    def call(self, verb: str, url: str, method: str, *args: Any, **more: Any) -> Any:
        """Calls a method of fsspec.

        Args:
            verb: of the call, for errors.
            url: of the object, for errors.
            method: name of the method.
            args: its arguments; `callback` should be `Moved`.

        Raises:
            OSError: of one line, with the store's answer and what to do about it;
                FileNotFoundError and FileExistsError without the latter.
        """
        moved = more.get("callback", Moved())
        function = getattr(self._files, f"_{method}")

        async def awaited() -> Any:
            # Created in the loop's own thread.
            task = asyncio.ensure_future(function(*args, **more))
            return await self._wait(task, moved, f"{verb} {url}")

        try:
            return sync(self._files.loop, awaited)
        except (FileNotFoundError, FileExistsError) as error:
            # The message for a missing bucket and a missing object is the same.
            found = isinstance(error, FileExistsError)
            code = error.errno or (errno.EEXIST if found else errno.ENOENT)
            raise type(error)(code, _message(verb, url, error)) from None
        except Exception as error:
            code = error.errno if isinstance(error, OSError) else None
            text = with_advice(_message(verb, url, error), error)
            raise OSError(code or errno.EIO, text) from error

    async def _wait(self, task: asyncio.Task, moved: "Moved", what: str) -> Any:
        waited = 0.0
        while not (await asyncio.wait({task}, timeout=WAITING))[0]:
            waited, moved.moved = 0.0 if moved.moved else waited + WAITING, False
            if waited >= GIVING_UP:
                task.cancel()
                text = f"no answer within {GIVING_UP:.0f} seconds"
                raise OSError(errno.EIO, text)
            if waited and not self._has_warned:
                logger.warning("cannot %s yet: trying for %.0f s", what, GIVING_UP)
                self._has_warned = True
        return task.result()


class Moved(Callback):
    """Notes that bytes of a file were sent or received."""

    moved = False

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        """Called by the store's library."""
        self.moved = True


def with_advice(text: str, error: Exception) -> str:
    """The text of an error with what a user can do about the answer of a store."""
    hint = "the store does not answer as it should: try again later"
    if _REFUSALS.search(str(error)):
        hint = "check the credentials, and what they allow in this bucket"
    return text if text.endswith(hint) else f"{text}; {hint}"


def is_of_store(error: Exception) -> bool:
    """True for a failure of the store, False for a missing or damaged object."""
    if isinstance(error, FileNotFoundError):
        return False
    package = type(error).__module__.partition(".")[0]
    return (
        isinstance(error, OSError)
        or package in ("aiohttp", "botocore", "gcsfs", "google")
        # Of TensorStore.
        or bool(_FAILURES.search(str(error)))
    )


def _message(verb: str, url: str, error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return f"cannot {verb} {url}: {short(said)}"


def _filesystem(scheme: str) -> Any:
    # A cached listing would hide what other processes write.
    try:
        if scheme == "gs":
            import gcsfs

            return gcsfs.GCSFileSystem(
                use_listings_cache=False, requests_timeout=_timeout()
            )
        import s3fs

        return s3fs.S3FileSystem(use_listings_cache=False)
    except ImportError as error:
        raise ValueError(
            f"{scheme}:// needs the package {error.name}: pip install {error.name}"
        ) from error


def _timeout() -> Any:
    """Of gcsfs's requests, of which one reads a whole file."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
