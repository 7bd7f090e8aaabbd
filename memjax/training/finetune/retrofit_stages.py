"""Both parts of a retrofit: choice of layers, distillation, tuning."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from memjax.buckets.writing import write_atomically
from memjax.checks import check_sizes
from memjax.config_io import AnyPath, read_json, to_record
from memjax.data import load_tokens
from memjax.evaluation.sensitivity import layer_sensitivity, most_sensitive
from memjax.models.language_model.retrofit import attention_layers
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import LoopConfig
from memjax.training.finetune.retrofit_settings import RetrofitSettings
from memjax.training.finetune.retrofit_stage import OTHERS, RetrofitStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.finetune.start import load_backbone
from memjax.training.monitoring.header import say_line
from memjax.training.optimizer import OptimizerConfig
from memjax.training.resume import require_same_config

#: File of a run with the chosen layers and their measured sensitivity.
LAYERS_FILE = "layers.json"


@dataclasses.dataclass(frozen=True)
class PartConfig:
    """Settings that each part has for itself.

    Attributes:
        optimizer: hyperparameters.
        loop: steps, checkpoints, evaluation, log.
    """

    optimizer: OptimizerConfig
    loop: LoopConfig


@dataclasses.dataclass(frozen=True)
class RetrofitStages(RetrofitSettings):
    """A complete retrofit; see `RetrofitSettings` for the other settings.

    Without new parameters, as with memory="none", there is no distillation.

    Attributes:
        layers: numbers of the hybrid layers, or "auto": those most sensitive to the
            window, by `layer_sensitivity` on training samples.
        count: number of layers for "auto".
        choose_texts: number of samples for "auto".
        distill: the first part; see `distillation.py`.
        tune: the second part, with adapters.
    """

    layers: tuple[int, ...] | Literal["auto"] = "auto"
    count: int = 6
    choose_texts: int = 4
    distill: PartConfig = PartConfig(
        OptimizerConfig(learning_rate=2e-3, warmup_ratio=0.05, weight_decay=0.0),
        LoopConfig(steps=512, save_every=128),
    )
    tune: PartConfig = PartConfig(
        OptimizerConfig(learning_rate=5e-4, warmup_ratio=0.05, weight_decay=0.0),
        LoopConfig(steps=384, save_every=32),
    )

    def __post_init__(self):
        super().__post_init__()
        check_sizes(count=self.count, choose_texts=self.choose_texts)

    def summary(self) -> tuple[str, str]:
        """The memory and its sizes, for a list of presets."""
        sizes = f"window {self.window:,}, {self.sinks} sinks"
        return f"{self.memory} in {self.count} layers", sizes

    def stages(self) -> tuple[tuple[str, RetrofitStage], ...]:
        """The stages in order, by their folders.

        Raises:
            ValueError: if the layers are still "auto", see `with_layers`.
        """
        if self.layers == "auto":
            raise ValueError("layers='auto' must be resolved before there are stages")
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(RetrofitSettings)
        }

        # Without settings of the other part: one distillation serves many tunings.
        def of_part(part):
            return {**shared, **OTHERS[part], **vars(getattr(self, part))}

        tune = RetrofitStage(**of_part("tune"), part="tune")
        if not self.has_new:
            return (("", tune),)
        distill = RetrofitStage(**of_part("distill"), part="distill")
        # In another order than the distillation.
        tune = dataclasses.replace(tune, seed=self.seed + 1)
        return (("stage1", distill), ("stage2", tune))


def with_layers(
    config: RetrofitStages,
    backbone: AnyPath | str,
    run_dir: AnyPath,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RetrofitStages:
    """The configuration with numbers for layers="auto".

    The measurement is stored in `layers.json` in the run's folder, and read from there
    by later calls.

    Args:
        config: of the retrofit.
        backbone: as `finetune` takes it.
        run_dir: the run's folder.
        progress: called with layers measured and in total.

    Raises:
        ValueError: see `layer_sensitivity` and `most_sensitive`; or the folder's layers
            were chosen with other settings.
    """
    if config.layers != "auto":
        return config
    run_dir = check_path("run_dir", run_dir)
    model, stored, digest, _ = load_backbone(backbone)
    file, settings = run_dir / LAYERS_FILE, _settings(config, digest)
    if file.is_file():
        found = _read(file)
        # Before minutes of work that the run in this folder would refuse.
        require_same_config(found["settings"], settings, (), str(file))
        return dataclasses.replace(config, layers=_said(found))
    attention = attention_layers(model.config)
    if config.count > len(attention):
        raise ValueError(
            f"count must be in [1, {len(attention)}], the attention layers, "
            f"got {config.count}"
        )
    data = config.data
    documents = load_tokens(
        data.source, stored.tokenizer, "train", data.cache_dir, data.rows
    )
    texts = config.texts(documents, model.vocab_size, config.choose_texts)
    rises = layer_sensitivity(model, texts, config.window, config.sinks, progress)
    layers = most_sensitive(rises.tolist(), config.count)
    measured = [None if np.isnan(rise) else float(rise) for rise in rises]
    record = {"layers": layers, "rises": measured, "settings": settings}
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(record, indent=1))
    return dataclasses.replace(config, layers=_said(record))


def _read(file: AnyPath) -> dict[str, Any]:
    """The record of `with_layers`."""
    found = read_json(file)
    if not isinstance(found, dict) or {*found} != {"layers", "rises", "settings"}:
        raise ValueError(f"{file} is no choice of layers; delete it to choose again")
    return found


def _said(record: dict[str, Any]) -> tuple[int, ...]:
    """Layers of a record, printed with their sensitivity."""
    layers, rises = tuple(record["layers"]), record["rises"]
    if jax.process_index() == 0:
        measured = ", ".join(f"{layer} ({rises[layer]:+.3f})" for layer in layers)
        say_line("layers", f"{measured} nats a token, each windowed alone")
    return layers


def _settings(config: RetrofitStages, digest: str) -> dict[str, Any]:
    """Settings that determine the choice."""
    names = ("count", "choose_texts", "window", "sinks", "context_length", "seed")
    chosen = {name: getattr(config, name) for name in names}
    return chosen | {
        "source": to_record(config.data)["source"],
        "backbone_digest": digest,
    }


def presets() -> dict[str, RetrofitStages]:
    """Retrofits by name.

    "retrofit" takes about a million tokens, a quarter of them for the distillation,
    four times each.
    """
    return {"retrofit-tiny": _tiny(), "retrofit": RetrofitStages()}


def _tiny() -> RetrofitStages:
    """In minutes on a CPU, for a backbone of `memjax train`."""
    default = RetrofitStages()

    def shorter(part, steps):
        return PartConfig(part.optimizer, LoopConfig(steps=steps, save_every=50))

    return dataclasses.replace(
        default,
        window=64,
        context_length=512,
        count=2,
        data=SampleConfig(batch_size=4, validation_texts=8),
        distill=shorter(default.distill, 100),
        tune=shorter(default.tune, 300),
    )
