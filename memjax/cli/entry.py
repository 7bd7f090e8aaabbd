"""The program `memjax`: what needs no JAX is answered before it is imported.

JAX, flax and the presets take seconds to import.
"""

import importlib
import sys

from memjax import __version__
from memjax.cli.presets import help_of

#: The commands, each with the first sentence of its help.
COMMANDS = {
    "train": "Trains a preset, every field of which can be overridden, or resumes a "
    "run.",
    "finetune": "Fine-tunes a pretrained model with a memory, or resumes a run.",
    "eval": "Perplexity of a model, by kind of text and by position.",
    "generate": "Reads a prompt of any length into the memory and writes on.",
    "tell": "Reads text files into a memory.",
    "ask": "Answers a question from a memory, which stays as it is.",
    "chat": "Talks with a model; each turn is saved, and the next call goes on from "
    "there.",
    "data": "Lists a source's documents.",
    "import": "Turns a pretrained model into a folder that loads quickly, here and "
    "elsewhere.",
    "export": "Writes a model as a folder of safetensors, which transformers loads if "
    "it can.",
}


def main(argv: list[str] | None = None) -> None:
    """Answers --help and --version, and gives any other line to `memjax.cli.main`."""
    argv = sys.argv[1:] if argv is None else argv
    if answer := quick_answer(argv):
        print(answer)
    else:
        importlib.import_module("memjax.cli.main").main(argv)


def quick_answer(argv: list[str]) -> str | None:
    """What needs no JAX: the version, and lists of commands and of presets."""
    if argv == ["--version"]:
        return f"memjax {__version__}"
    if argv in (["--help"], ["-h"]):
        return help_text()
    return help_of(argv)


def help_text() -> str:
    """The commands, and how to ask on."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {said}" for name, said in COMMANDS.items()]
    return "\n".join(
        [
            "usage: memjax [--help] [--version] COMMAND ...",
            "",
            *lines,
            "",
            "memjax COMMAND --help lists the options of a command, memjax train --help "
            "the presets.",
            "Exit codes: 0 done; 2 bad input, with one line on stderr; 75 stopped by a "
            "signal",
            "with everything saved (run the same command again to resume); 1 anything "
            "else.",
        ]
    )


if __name__ == "__main__":
    main()
