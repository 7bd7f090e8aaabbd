"""Commands called in this process, and sizes of a tiny run."""

import contextlib
import io

import pytest

from memjax.cli import main as cli
from tests.cli.sizes import TRANSFORMER as TRANSFORMER

# TensorBoard takes a second to import.
SIZES = """
    --loop.writers --data.tokenizer bytes --data.context-length 16 --data.batch-size 2
    --loop.steps 2
""".split()


def run(*words: object) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr of one command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(word) for word in words])
    return int(stop.value.code or 0), out.getvalue(), err.getvalue().splitlines()


def command(*words: object) -> tuple[int, str, list[str]]:
    """As `run`, with the errors and warnings alone: the rest is the status."""
    code, out, err = run(*words)
    return code, out, [x for x in err if x.startswith(("memjax: ", "warning: "))]


def refused(*words: object) -> str:
    """The one line of a refusal."""
    code, out, err = command(*words)
    assert code == 2 and len(err) == 1 and out == "", (code, out, err)
    assert err[0].startswith("memjax: ")
    return err[0]
