"""Tests of the tracebacks that the program hides, and of those that it shows."""

import subprocess
import sys

import pytest

#: As the program: hidden before absl is imported, by code of a package.
LOGGED = """
from memjax.cli import quiet
quiet.hide_reported()
from absl import logging
code = "try: 1 / 0\\nexcept ZeroDivisionError: logging.error('lost', exc_info=True)"
exec(compile(code, "/site-packages/{}/save.py", "exec"))
"""


@pytest.mark.parametrize(("package", "shown"), [("orbax", False), ("flax", True)])
def test_tracebacks_that_memjax_reports_are_hidden(package: str, shown: bool) -> None:
    program = [sys.executable, "-c", LOGGED.format(package)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ("Traceback" in done.stderr) == shown
