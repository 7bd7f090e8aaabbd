"""The command `memjax finetune`."""

from pathlib import Path
from typing import Annotated

import tyro

from memjax import finetune as finetuning
from memjax.finetune_config import TwoStageConfig, presets

Config = tyro.extras.subcommand_type_from_defaults(
    presets(), prefix_names=False, sort_subcommands=False
)


def finetune(
    config: Annotated[Config, tyro.conf.arg(name="")],  # pyright: ignore[reportInvalidTypeForm]
    backbone: Path | None = None,
    run_dir: Path = Path("runs/finetuned"),
    start: Path | None = None,
) -> int:
    """Fine-tunes a pretrained model with a memory, or resumes a run.

    Args:
        config: the preset; "hmt" does both stages, in stage1 and stage2 of the folder.
        backbone: folder of a run, Hugging Face folder or GGUF file.
        run_dir: folder of the run; the same command on the same folder goes on.
        start: of a second stage: folder of the first, instead of the backbone.
    """
    if isinstance(config, TwoStageConfig):
        if backbone is None or start is not None:
            raise ValueError(
                "both stages need --backbone and take no --start, got "
                f"backbone={backbone and str(backbone)!r}, "
                f"start={start and str(start)!r}"
            )
        outcome = finetuning.finetune_two_stages(config, backbone, run_dir)
    else:
        outcome = finetuning.finetune(config, backbone, run_dir, start)
    print(f"{outcome.reason} at step {outcome.step}; run folder {run_dir}")
    return outcome.exit_code
