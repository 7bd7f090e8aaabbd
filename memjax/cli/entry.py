"""The program `memjax`: what needs no JAX is answered before it is imported.

JAX, flax and the presets take seconds to import.
"""

import importlib
import os
import sys

from memjax.cli.help import quick_answer


def main(argv: list[str] | None = None) -> None:
    """Answers --help and --version, and gives any other line to `memjax.cli.main`."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            if answer := quick_answer(argv):
                print(answer)
            else:
                importlib.import_module("memjax.cli.main").main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who read the output, as `head`, has ended. Python flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
