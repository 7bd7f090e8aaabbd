"""Version, commands and presets, printed without JAX."""

from pathlib import Path

from memjax import __version__

#: Tables of presets, written by `python -m memjax.cli.describe`.
TABLES = Path(__file__).with_name("presets.txt").read_text("utf-8").split("\n\n")

#: The commands, each with the first sentence of its help.
COMMANDS = {
    "train": "Trains a model from a preset, or resumes a run.",
    "finetune": "Fine-tunes a pretrained model with a memory, or resumes a run.",
    "aot": "Compiles a run's steps for TPUs, without one, and reports memory and cost.",
    "eval": "Evaluates the perplexity of a model, by kind of text and by position.",
    "generate": "Reads a prompt of any length into the memory, and continues it.",
    "tell": "Reads text files into a memory.",
    "ask": "Answers a question from a memory, without changing it.",
    "chat": "Chats with a model; the memory is saved after each turn, and continued "
    "later.",
    "memory": "Shows, copies or removes the memory of a conversation.",
    "data": "Lists a source's documents, or prepares their tokens for training.",
    "import": "Converts a pretrained model to a folder of safetensors, which loads "
    "quickly.",
    "export": "Exports a model as a folder of safetensors; transformers loads it if it "
    "can.",
}
_COMMON = """\
  --config FILE   the config.json of any run, instead of a preset; its fields are
                  options too
  --run-dir PATH  folder of the run; the same command with the same folder resumes it
                  (default: {run_dir})
  --compilation-cache PATH
                  folder for compiled programs, or "off" (default:
                  JAX_COMPILATION_CACHE_DIR, or the user's cache folder)
  --distributed {{auto,on,off}}
                  join the other hosts: "on" for a TPU pod; "auto" if GKE, Slurm or
                  Open MPI name several (default: auto)
"""
_HELP = {
    "train": """\
usage: memjax train PRESET [options]
       memjax train --config FILE [options]

Trains a model from a preset, or resumes a run.

"""
    + _COMMON.format(run_dir="runs/latest")
    + """
memjax train PRESET --help lists every field, such as --loop.steps, --data.source
or --model.mechanisms.0.window.
Sizes of 100m and more need data like the papers', such as --data.source tfds:pg19 or
hf:allenai/c4:en, and --data.tokenizer of a large vocabulary.

"""
    + TABLES[0]
    + "\n",
    "finetune": """\
usage: memjax finetune PRESET --backbone MODEL [options]
       memjax finetune --config FILE [options]

Fine-tunes a pretrained model with a memory, or resumes a run.

"""
    + _COMMON.format(run_dir="runs/finetuned")
    + """\
  --backbone MODEL
                  folder of a run or of safetensors, a GGUF file, or a model of the
                  hub ("owner/name"); with --config that of the file
  --start PATH    for a later stage, the folder of the stage before, instead of the
                  backbone

memjax finetune PRESET --help lists every field, such as --loop.steps or --data.source;
those of one stage begin with its name, --stage1.loop.steps, of retrofit
--distill.loop.steps and --tune.loop.steps; without it they are of all stages.

"""
    + TABLES[1],
    "aot": """\
usage: memjax aot PRESET --topology CHIPS [options]
       memjax aot --config FILE --topology CHIPS [options]

Compiles a run's steps for TPUs, without one, and reports memory and cost.
Exit code 1 if one does not fit.

  --topology CHIPS
                  such as v5e:16x16, v5p:4x4x4 or v6e:8x8; --mesh.* must fit them
  --slices N      number of topologies, joined by the data-center network (default: 1)
  --what {train,evaluate,decode} ...
                  the steps (default: train)
  --backbone MODEL
                  for a fine-tuning, a preset of memjax train or a config.json
  --search {batch,context}
                  also find the largest that fits, by compiling several
  --no-cycles     do not count cycles, which compiles faster
  --output FILE   file for the report, as JSON

The presets are those of memjax train and memjax finetune: their --help lists them.
memjax aot PRESET --help lists every field.
""",
}


def quick_answer(argv: list[str]) -> str | None:
    """The version, or a list of commands or presets; None for any other line."""
    if argv == ["--version"]:
        return f"memjax {__version__}"
    if argv[:1] in (["--help"], ["-h"]):
        return help_text()
    return help_of(argv)


def help_text() -> str:
    """The list of commands."""
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


def help_of(argv: list[str]) -> str | None:
    """The list of presets for a command that takes one; None for any other line."""
    if len(argv) == 2 and argv[1] in ("--help", "-h"):
        return _HELP.get(argv[0])
    return None
