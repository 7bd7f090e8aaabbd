"""Save and load HMT and RMT, under the tensor names of the official program.

    memory_cell.model.*          the backbone, as Hugging Face names it
    memory_cell.memory  [1, E]   M_init
    mem                 [1, E]   T, with retrieval
    cross_attn.wq.weight, cross_attn.wk.weight  [d_h, E], with retrieval

OswaldHe/HMT-pytorch saves pickles, which are not read here. In PyTorch,
`safetensors.torch.save_file(torch.load(file, weights_only=True), "model.safetensors")`
converts one. Its `mem_map` is left out: the paper does not have it, and none of the
paper's settings uses it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from memjax.config_io import from_record, to_record
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf import tensor_names
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.hf.safetensors_folder import SafetensorsFolder
from memjax.models.checkpoints.hf.safetensors_write import write_folder
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT, add_hmt
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.lora import merge_lora

BACKBONE, INITIAL_MEMORY, SUMMARY_PROMPT = (
    "memory_cell.model.",
    "memory_cell.memory",
    "mem",
)
QUERY, KEY = "cross_attn.wq.weight", "cross_attn.wk.weight"
UNUSED = "memory_cell.mem_map."
MODEL_TYPE = "hmt"
#: Key of the `HMTConfig` in the backbone's `config.json`.
CONFIG_KEY = "memjax_hmt"

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
    """Reads what `save_hmt` wrote, or an official checkpoint beside its `config.json`.

    Args:
        folder: has `config.json` and safetensors.
        config: of the memory; None reads what `save_hmt` saved.
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


def save_hmt(
    model: HMT,
    folder: Path | str,
    text: TextInterface | None = None,
    *,
    origin: str = "",
    readme: str | None = None,
    dtype: Dtype = "float32",
) -> None:
    """Writes a folder for `load_hmt`, with the official program's tensor names.

    LoRA adapters are merged. The model_type is "hmt", which transformers refuses: by
    the backbone's it would load the folder and draw every parameter anew.

    Args:
        model: HMT or RMT over any backbone.
        folder: must not exist, or be empty; it appears whole or not at all.
        text: tokenizer, chat template, and how to draw; None is none.
        origin: the model that the backbone was.
        readme: the model card; None is none.
        dtype: of the saved tensors.

    Raises:
        ValueError: if the folder is not empty.
    """
    backbone = plain_backbone(model)
    try:
        config = to_hf_config(backbone.config)
        tensors = tensor_names.tensors_from_parameters(backbone)
    except ValueError:
        # The backbone is of no architecture that Hugging Face has, such as a recurrent
        # one.
        config, tensors = (
            own_format.to_config(backbone),
            own_format.named_tensors(backbone),
        )
    config = own_format.around_backbone(
        config, MODEL_TYPE, {CONFIG_KEY: to_record(model.config)}, origin
    )
    files = (text or TextInterface()).files(readme)
    write_folder(Path(folder), config, _named(model, tensors), files, dtype=dtype)


def plain_backbone(model: HMT) -> LanguageModel:
    """The backbone as it came, with its adapters merged."""
    # HMT shortened the caches and may have changed remat.
    own = model.pretrained
    return replace_config(
        merge_lora(model.backbone), mechanisms=own.mechanisms, remat=own.remat
    )


def _named(
    model: HMT, tensors: Iterator[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tensors:
        yield BACKBONE + name, value
    yield INITIAL_MEMORY, np.asarray(model.initial_memory.get_value())[None]
    if model.config.retrieval:
        yield SUMMARY_PROMPT, np.asarray(model.summary_prompt.get_value())[None]
        # PyTorch stores a linear layer as [out, in].
        yield QUERY, np.asarray(model.query.get_value()).T
        yield KEY, np.asarray(model.key.get_value()).T


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
    read = lambda name: get(BACKBONE + name)
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
        return own_format.build_model(described, shapes, get, dtype, where)
    config = from_hf_config(described, dtype)
    return tensor_names.parameters_from_tensors(config, shapes, get, where)
