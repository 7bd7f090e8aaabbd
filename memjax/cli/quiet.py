"""Libraries print tracebacks of failures that they also raise, and memjax reports.

Of a checkpoint that cannot be written these are hundreds of lines, some of them by
threads that end after the command.
"""

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: Loggers, and the packages of such messages.
_REPORTED = {"absl": "orbax", "gcsfs": "gcsfs", "asyncio": "asyncio"}


def hide_reported() -> None:
    """Hides these tracebacks, and no other message, until the program ends."""
    for name in _REPORTED:
        # A filter that is there is not added again.
        logging.getLogger(name).addFilter(_is_unreported)
    sys.unraisablehook = functools.partial(_unraisable, sys.unraisablehook)


def _is_unreported(record: logging.LogRecord) -> bool:
    """False for the record of a failure that memjax reports."""
    if not record.exc_info:
        return True
    # absl's logger, made here before absl is imported, says absl's own file.
    frames = traceback.walk_tb(record.exc_info[2])
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in frames)]
    return not any(_REPORTED[record.name] in file.split(os.sep) for file in files)


def _unraisable(otherwise: Callable[[Any], None], found: Any) -> None:
    # Of TensorStore's threads, where others of a failed save were under way.
    if str(found.exc_value) != "Event loop is closed":
        otherwise(found)
