"""Load HMT and RMT, under the tensor names of the official program.

OswaldHe/HMT-pytorch saves pickles, which are not read here. In PyTorch,
`safetensors.torch.save_file(torch.load(file, weights_only=True), "model.safetensors")`
converts one. Its `mem_map` is left out: the paper does not have it, and none of the
paper's settings uses it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from memjax.config_io import from_record
from memjax.models.checkpoints import own_format, own_model
from memjax.models.checkpoints.hf import parameters
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.hf.safetensors_folder import SafetensorsFolder
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT, add_hmt
from memjax.models.hmt.saving import (
    BACKBONE,
    CONFIG_KEY,
    INITIAL_MEMORY,
    KEY,
    QUERY,
    SUMMARY_PROMPT,
)
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel

UNUSED = "memory_cell.mem_map."

Shapes = Mapping[str, tuple[int, ...]]
Get = Callable[[str], Float32[np.ndarray, "..."]]


def load_official(
    file: Path | str, hf_config: Mapping[str, Any], config: HMTConfig
) -> HMT:
    """Reads a checkpoint of the official program.

    Args:
        file: safetensors with its names.
        hf_config: `config.json` of the backbone; without `model_type` that of a Llama.
        config: of the memory. A `retrieval_dim` of None is the checkpoint's. Without
            retrieval, the checkpoint's parameters of it are not read.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of another shape,
            as those of a backbone of another width are; or as `add_hmt`.
    """
    found = SafetensorsFile(Path(file))
    hf_config = {"model_type": "llama"} | dict(hf_config)
    return _build(hf_config, config, found.shapes, found.get, str(file))


def load_hmt(
    folder: Path | str, config: HMTConfig | None = None, *, dtype: Dtype = "float32"
) -> HMT:
    """Reads a folder of `HMT.save`, or an official checkpoint with its `config.json`.

    Args:
        folder: has `config.json` and safetensors.
        config: of the memory; None reads the saved one.
        dtype: of the activations.

    Raises:
        ValueError: as `load_official`, or if neither `config` nor the folder has the
            memory's configuration.
    """
    found = SafetensorsFolder(Path(folder))
    if config is None:
        if CONFIG_KEY not in found.config:
            raise ValueError(f"{folder} does not say what its memory is: give config")
        record = found.config[CONFIG_KEY]
        saved: HMTConfig = from_record(HMTConfig, record, f"{folder}: {CONFIG_KEY}")
    else:
        saved = config
    return _build(found.config, saved, found.shapes, found.get, str(folder), dtype)


def _build(
    described: Mapping[str, Any],
    config: HMTConfig,
    shapes: Shapes,
    get: Get,
    where: str,
    dtype: Dtype = "float32",
) -> HMT:
    shapes = {n: shape for n, shape in shapes.items() if not n.startswith(UNUSED)}
    config = _fill_retrieval_dim(config, shapes)
    start = len(BACKBONE)
    inner = {n[start:]: s for n, s in shapes.items() if n.startswith(BACKBONE)}

    def read(name):
        return get(BACKBONE + name)

    backbone = _backbone(described, inner, read, where, dtype)
    expected = {INITIAL_MEMORY: (1, backbone.width)}
    if config.retrieval:
        d_h = config.retrieval_dim or backbone.width
        expected |= {SUMMARY_PROMPT: (1, backbone.width)}
        expected |= {QUERY: (d_h, backbone.width), KEY: (d_h, backbone.width)}
    # A stage-2 checkpoint may be read without its retrieval.
    ignored = () if config.retrieval else (SUMMARY_PROMPT, QUERY, KEY)
    memory = {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(BACKBONE) and name not in ignored
    }
    own_format.require_tensors(expected, memory, where)
    # Any key: all that it draws is replaced by the checkpoint.
    model = add_hmt(backbone, config, key=jax.random.key(0))
    model.initial_memory.set_value(jnp.asarray(get(INITIAL_MEMORY)[0]))
    if config.retrieval:
        model.summary_prompt.set_value(jnp.asarray(get(SUMMARY_PROMPT)[0]))
        model.query.set_value(jnp.asarray(get(QUERY).T))
        model.key.set_value(jnp.asarray(get(KEY).T))
    return model


def _fill_retrieval_dim(config: HMTConfig, shapes: Shapes) -> HMTConfig:
    """The config with the checkpoint's d_h, if its own is None."""
    if not config.retrieval or config.retrieval_dim or len(shapes.get(QUERY, ())) != 2:
        return config
    return dataclasses.replace(config, retrieval_dim=shapes[QUERY][0])


def _backbone(
    described: Mapping[str, Any], shapes: Shapes, get: Get, where: str, dtype: Dtype
) -> LanguageModel:
    described = own_format.of_backbone(described)
    if described.get("model_type") == own_format.MODEL_TYPE:
        return own_model.build_model(described, shapes, get, dtype, where)
    config = from_hf_config(described, dtype)
    return parameters.parameters_from_tensors(config, shapes, get, where)
