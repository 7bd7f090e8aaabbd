"""The help of `memjax train` and `memjax finetune`, with a line a preset; no JAX."""

from memjax.cli.preset_lines import FINETUNE, TRAIN

_COMMON = """\
  --config FILE   instead of a preset: the config.json of any run, whose fields are
                  options here too
  --run-dir PATH  folder of the run; the same command on the same folder resumes it
                  (default: {run_dir})
"""
_HELP = {
    "train": """\
usage: memjax train PRESET [options]
       memjax train --config FILE [options]

Trains a preset, every field of which can be overridden, or resumes a run.

"""
    + _COMMON.format(run_dir="runs/latest")
    + """\
  --distributed {auto,on,off}
                  join the other hosts: "on" for a TPU pod; "auto" does so where
                  GKE, Slurm or Open MPI name several (default: auto)

memjax train PRESET --help lists every field, such as --loop.steps, --data.source
or --model.mixers.0.window.

"""
    + TRAIN,
    "finetune": """\
usage: memjax finetune PRESET --backbone MODEL [options]
       memjax finetune --config FILE [options]

Fine-tunes a pretrained model with a memory, or resumes a run.

"""
    + _COMMON.format(run_dir="runs/finetuned")
    + """\
  --backbone MODEL
                  folder of a run, Hugging Face folder, GGUF file, or a model of the
                  hub ("owner/name"); that of the file with --config
  --start PATH    of a later stage: folder of the stage before, instead of the
                  backbone

memjax finetune PRESET --help lists every field, such as --loop.steps or --data.source;
those of a training in stages begin with its name: --stage1.loop.steps.

"""
    + FINETUNE,
}


def help_of(argv: list[str]) -> str | None:
    """What `memjax train --help` and `memjax finetune --help` print; None of others."""
    if len(argv) == 2 and argv[1] in ("--help", "-h"):
        return _HELP.get(argv[0])
    return None
