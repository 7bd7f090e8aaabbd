"""The command `memjax finetune`."""

from pathlib import Path
from typing import Any, Literal, cast

from memjax.buckets.bucket import as_path
from memjax.cli import cluster
from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.cli.texts.sample import show_next
from memjax.config_io import AnyPath
from memjax.status import Status
from memjax.training.finetune import finetune as finetuning
from memjax.training.finetune import hmt_presets, mplus_presets, retrofit_stages
from memjax.training.finetune.curricula import HMTStages, MPlusStages
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.retrofit_stages import RetrofitStages, with_layers
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.monitoring.curves import draw_curves

#: Types of a preset or of a run's record.
Config = (
    SegmentStage | MPlusStage | RetrofitStage | HMTStages | MPlusStages | RetrofitStages
)


def presets() -> dict[str, Any]:
    """All fine-tunings by name."""
    return hmt_presets.presets() | mplus_presets.presets() | retrofit_stages.presets()


def finetune(
    config: Config,
    backbone: str | None = None,
    run_dir: Path = Path("runs/finetuned"),
    start: Path | None = None,
    compilation_cache: str | None = None,
    distributed: Literal["auto", "on", "off"] = "auto",
) -> int:
    """Fine-tunes a pretrained model with a memory, or resumes a run.

    Args:
        config: the preset; "hmt" trains both stages, in stage1 and stage2 of the
            folder, "mplus" all of its own, "retrofit" chooses the layers and then
            trains both.
        backbone: folder of a run or of safetensors, a GGUF file, or a model of the hub
            ("owner/name").
        run_dir: folder of the run, or its URL on gs:// or s3://; the same command with
            the same folder resumes it.
        start: for a later stage, the folder of the stage before, instead of the
            backbone.
        compilation_cache: folder for compiled programs, or "off"; None is
            JAX_COMPILATION_CACHE_DIR, or else the user's cache folder.
        distributed: join the other hosts: "on" for a TPU pod; "auto" if GKE, Slurm or
            Open MPI name several.
    """
    enable_compilation_cache(compilation_cache)
    folder = as_path(run_dir)
    with cluster.joined(distributed):
        if getattr(config, "layers", None) == "auto":
            config = _with_layers(cast(RetrofitStages, config), backbone, folder)
        stages = config.stages()
        # A curriculum begins with the backbone; later stages follow the one before.
        if len(stages) > 1 and (backbone is None or start is not None):
            raise ValueError(
                "all stages need --backbone and take no --start, got "
                f"backbone={backbone!r}, "
                f"start={start and str(start)!r}"
            )
        outcome = finetuning.finetune_stages(stages, backbone, folder, start)
    print(f"{outcome.reason} at step {outcome.step}; run folder {folder}")
    for name, _ in stages if outcome.reason != "preempted" else ():
        if curves := draw_curves(folder / name):
            print(f"wrote {curves}")
    if outcome.reason == "finished":
        show_next(folder)
    return outcome.exit_code


def _with_layers(
    config: RetrofitStages, backbone: str | None, run_dir: AnyPath
) -> RetrofitStages:
    """The configuration with numbers for layers."""
    if backbone is None:
        raise ValueError("--layers auto needs --backbone, got none")
    with Status("choosing layers", "layers") as progress:
        return with_layers(config, backbone, run_dir, progress)
