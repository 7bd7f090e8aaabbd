"""The program `memjax`: answers help without JAX, and starts `memjax.cli.main`.

JAX, flax and the presets take seconds to import.
"""

import gc
import importlib
import os
import sys
from typing import Any, NoReturn

from memjax import leaving
from memjax.cli import hosts, quiet
from memjax.cli.help import quick_answer


def main(argv: list[str] | None = None) -> None:
    """Answers --help and --version, and gives any other line to `memjax.cli.main`."""
    argv = sys.argv[1:] if argv is None else argv
    quiet.hide_reported()
    leaving.ignore_at_end()
    with leaving.flushed():
        try:
            if answer := quick_answer(argv):
                print(answer)
            elif hosts.joins_hosts(argv) and not hosts.is_supervised():
                command = [sys.executable, "-m", "memjax.cli.entry", *argv]
                sys.exit(hosts.supervise(command))
            else:
                if hosts.is_supervised():
                    leaving.end_with_parent()
                trains = argv[:1] in (["train"], ["finetune"])
                with leaving.at_once(resumable=trains):
                    _imported(trains).main(argv)
        except KeyboardInterrupt:
            # After the command.
            print("memjax: interrupted", file=sys.stderr)
            _leave(leaving.EXIT_INTERRUPTED)
        except SystemExit as ended:
            # 128 and the number of a signal.
            if isinstance(ended.code, int) and ended.code > 128:
                _leave(ended.code)
            raise


def _leave(code: int) -> NoReturn:
    """Ends the process after a signal, with its output written.

    Threads of XLA that still compile can end Python's own way out with a segmentation
    fault.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _imported(resumable: bool) -> Any:
    """The commands, which take seconds to import; a terminal sees that."""
    status = importlib.import_module("memjax.status")
    quiet = not sys.stderr.isatty()
    # Native modules turn an exception into another.
    with leaving.at_once(resumable, direct=True):
        with status.Status("starting memjax", quiet=quiet):
            commands = importlib.import_module("memjax.cli.main")
    # Modules stay: looking through them for garbage took a fifth of tracing a step.
    gc.freeze()
    return commands


if __name__ == "__main__":
    main()
