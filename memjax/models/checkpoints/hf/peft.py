"""LoRA adapters as PEFT writes them: `adapter_config.json` and one safetensors file.

A [r, in] and B [out, r] of a matrix are `base_model.model.<module>.lora_A.weight` and
`.lora_B.weight`, with the module's name in transformers' model.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from memjax.buckets.bucket import on_disk
from memjax.checks import joined, require_instance, short
from memjax.config_io import read_bounded
from memjax.mechanisms.hybrid import attention_params
from memjax.mechanisms.layers.projections import Adapted
from memjax.models.adapters import freeze
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.fields import read_entry, read_size
from memjax.models.checkpoints.hf.hub import ADAPTER, ADAPTER_CONFIG
from memjax.models.checkpoints.hf.hybrids.tables import HYBRIDS
from memjax.models.checkpoints.hf.safetensors_file import (
    SafetensorsFile,
    read_object,
)
from memjax.models.checkpoints.hf.safetensors_folder import (
    CARD,
    inside,
    require_no_pickle,
)
from memjax.models.checkpoints.hf.safetensors_write import atomic_folder
from memjax.models.checkpoints.hf.tensor import to_stored
from memjax.models.checkpoints.hf.tensor_names import tensor_names
from memjax.models.checkpoints.own_format import require_tensors
from memjax.models.language_model.model import LanguageModel
from memjax.models.lora import LowRank, Target, adapted
from memjax.nnx.params import as_arrays, as_params

PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."
#: Without effect on the function, or written as tensors.
KNOWN = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "use_rslora",
}
#: Any other entry, as use_dora, modules_to_save or alpha_pattern, may only be empty.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Others change the matrices of the base too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),
}


class Module(NamedTuple):
    """Where a matrix of transformers' model is here."""

    layer: int
    part: str
    target: Target


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Raises:
        ValueError: naming the entry that is not a LoRA of a language model alone.
    """
    file = inside(folder, ADAPTER_CONFIG)
    config = read_object(read_bounded(file), str(file))
    for key, value in config.items():
        if value not in ONLY.get(key, (value,)):
            raise ValueError(f"{file}: {key} must be {ONLY[key][0]!r}, got {value!r}")
        if value and key not in KNOWN | ONLY.keys():
            raise ValueError(f"{file}: {key} must be empty, got {short(value)}")
    return config


def load_adapter(base: LanguageModel, folder: Path) -> LanguageModel:
    """The base, frozen, with the adapters of a folder to train.

    Raises:
        ValueError: as `read_adapter_config`; if tensors are missing, unknown or of
            another shape; if the base has adapters, or is of no published family.
    """
    config = read_adapter_config(folder)
    if not (folder / ADAPTER).exists() and (folder / PICKLED).exists():
        require_no_pickle(folder / PICKLED)
    file = SafetensorsFile(inside(folder, ADAPTER))
    rank = read_size(config, "r")
    damping = math.sqrt(rank) if config.get("use_rslora") else rank
    scale = read_entry(config, "lora_alpha", float) / damping
    model, modules = freeze(base), _modules(base)
    given = {
        name.removeprefix(PREFIX).rpartition(".lora_")[0]: None for name in file.shapes
    }
    used = [name for name in given if name in modules]
    require_tensors(_shapes(base, used, rank), file.shapes, str(file.path))
    if not used:
        raise ValueError(f"{file.path} has no adapter")
    changes: dict[tuple[int, str], dict[str, LowRank]] = {}
    for name in used:
        layer, part, target = modules[name]
        down, up = (file.get(f"{PREFIX}{name}.lora_{x}.weight").T for x in "AB")
        weight = _weight(base, modules[name])
        summed = _summed(target, weight)
        changes.setdefault((layer, part), {})[target] = LowRank(
            jnp.asarray(down.reshape(*summed, rank)),
            jnp.asarray(up.reshape(rank, *weight.shape[len(summed) :])),
        )
    for (layer, part), change in changes.items():
        block = model.blocks[layer]
        new = adapted(getattr(block, part), as_params(change), scale)
        setattr(block, part, nnx.data(new))
    return model


def save_adapter(
    model: LanguageModel, folder: Path | str, *, base: str, readme: str | None = None
) -> None:
    """Writes the adapters of `add_lora` as a folder that PEFT loads.

    Args:
        model: with adapters of one rank and scale, over a base of a published family.
        folder: must not exist, or be empty; it appears whole or not at all.
        base: the model that they change: a name on the hub, with the commit behind an
            "@" if it is known, or a folder.
        readme: the model card, `README.md`; None is none.

    Raises:
        ValueError: if the model has no adapters, or PEFT could not express them; if
            the folder is not empty.
    """
    require_instance("model", model, LanguageModel)
    found = dict(_adapters(model))
    kinds = {(leaf.down.shape[-1], float(leaf.scale)) for leaf in found.values()}
    if len(kinds) != 1:
        had = joined(sorted(map(str, kinds))) or "none"
        raise ValueError(
            f"model must have LoRA adapters of one rank and scale, got {had}"
        )
    ((rank, scale),) = kinds
    name, at, revision = base.partition("@")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision if at else None,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        # Whole names: a part of the layers may be adapted.
        "target_modules": list(found),
        "inference_mode": True,
    }
    tensors = {}
    for name, leaf in found.items():
        down, up = (np.asarray(x, np.float32) for x in (leaf.down, leaf.up))
        pairs = {"A": down.reshape(-1, rank), "B": up.reshape(rank, -1)}
        for letter, value in pairs.items():
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = to_stored(value, "into")
    with atomic_folder(on_disk(folder)) as temporary:
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
        tensors = {n: np.ascontiguousarray(x) for n, x in tensors.items()}
        save_file(tensors, temporary / ADAPTER, {"format": "pt"})
        if readme is not None:
            (temporary / CARD).write_text(readme, encoding="utf-8")


def _modules(model: LanguageModel) -> dict[str, Module]:
    """The matrices that LoRA may change, by transformers' names."""
    family = to_hf_config(model.config)["model_type"]
    if family in HYBRIDS:
        # Their files join several of our matrices, whose adapters differ, in one.
        raise ValueError(
            f"model must have attention alone for PEFT's files, got {family}"
        )
    return {
        tensor.name.removesuffix(".weight"): Module(layer, part, target)
        for layer, block in tensor_names(model.config)["blocks"].items()
        for part in ("mechanism", "feed_forward")
        for target, tensor in block[part].items()
        if target in get_args(Target)
    }


def _weight(model: LanguageModel, module: Module) -> Any:
    params = attention_params(getattr(model.blocks[module.layer], module.part))
    return getattr(params, module.target)


def _summed(target: Target, weight: Any) -> tuple[int, ...]:
    """The input axes: the attention's output sums over heads and their widths."""
    return tuple(weight.shape[: 2 if target == "output" else 1])


def _shapes(
    model: LanguageModel, names: list[str], rank: int
) -> dict[str, tuple[int, ...]]:
    modules, shapes = _modules(model), {}
    for name in names:
        weight = _weight(model, modules[name])
        inputs = math.prod(_summed(modules[name].target, weight))
        outputs = math.prod(weight.shape) // inputs
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (rank, inputs)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (outputs, rank)
    return shapes


def _adapters(model: LanguageModel) -> Iterator[tuple[str, Adapted]]:
    for name, module in _modules(model).items():
        if isinstance(leaf := _weight(model, module), Adapted):
            yield name, as_arrays(leaf)
