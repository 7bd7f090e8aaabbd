"""The program `memjax`: what needs no JAX is answered before it is imported.

JAX, flax and the presets take seconds to import.
"""

import importlib
import sys

from memjax.cli.help import quick_answer


def main(argv: list[str] | None = None) -> None:
    """Answers --help and --version, and gives any other line to `memjax.cli.main`."""
    argv = sys.argv[1:] if argv is None else argv
    if answer := quick_answer(argv):
        print(answer)
    else:
        importlib.import_module("memjax.cli.main").main(argv)


if __name__ == "__main__":
    main()
