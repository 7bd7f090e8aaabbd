"""Load pretrained models from folders of safetensors or GGUF files, and save them.

    model, tokenizer = load_pretrained("SmolLM2-135M")
    save_pretrained(model, "mine", tokenizer)

Nothing that is read is executed; `safetensors_file`, `safetensors_folder` and
`gguf_file` check every name, size and offset before it is used.
"""

from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from memjax.models.checkpoints import own_format, tensor_names
from memjax.models.checkpoints.gguf_checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.hf_config import from_hf_config
from memjax.models.checkpoints.hf_export import to_hf_config
from memjax.models.checkpoints.safetensors_folder import (
    SafetensorsFolder,
    require_no_pickle,
)
from memjax.models.checkpoints.safetensors_write import require_free, write_folder
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.lora import merge_lora

SHARD_BYTES = 5 * 10**9
# Entries of `config.json` about the tokenizer, which a model does not have.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Pretrained(NamedTuple):
    """A model and its tokenizer.

    Attributes:
        model: parameters in float32.
        tokenizer: bytes of a `tokenizer.json`, for
            `memjax.data.documents.tokenizer.parse_tokenizer`; None if there is none.
    """

    model: LanguageModel
    tokenizer: bytes | None


def load_pretrained(
    path: Path | str, *, dtype: Dtype | None = None, with_tokenizer: bool = True
) -> Pretrained:
    """Reads a model of a Hugging Face family, or one that `save_pretrained` wrote.

    Args:
        path: a folder of `config.json` and safetensors, or a GGUF file.
        dtype: of the activations; None is the saved one of models that memjax saved in
            its own format, float32 of others.
        with_tokenizer: False does not read it, which helps if its kind is unknown.

    Raises:
        ValueError: naming file, tensor, what was expected and found, if the files are
            not sound or describe a model that is not built here; also without an
            optional package that is needed.
    """
    checkpoint = _open(Path(path))
    tokenizer = checkpoint.tokenizer() if with_tokenizer else None
    return Pretrained(_build(checkpoint, dtype), tokenizer)


def save_pretrained(
    model: nnx.Module,
    folder: Path | str,
    tokenizer: bytes | None = None,
    *,
    dtype: Dtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes a folder that transformers loads, if it has such a model.

    Models of the kinds of Llama, Mistral, Qwen2 and OPT have their tensor names.
    Others, as all with recurrent layers, are written for `load_pretrained` alone. LoRA
    adapters are merged.

    Args:
        model: a LanguageModel; of HMT and M+ save the backbone.
        folder: must not exist, or be empty; it appears whole or not at all.
        tokenizer: bytes of a `tokenizer.json`.
        dtype: of the saved tensors.
        shard_bytes: size of the largest file; more tensors go to several files.

    Returns:
        The model_type: "llama", "mistral", "qwen2", "opt", or "memjax" for a model
        that transformers does not have.

    Raises:
        ValueError: if the folder is not empty, or the model is no LanguageModel.
    """
    return _write(model, Path(folder), tokenizer, {}, dtype, shard_bytes)


def convert(
    source: Path | str,
    folder: Path | str,
    *,
    dtype: Dtype = "float32",
    with_tokenizer: bool = True,
) -> str:
    """Reads any source and writes it as a folder, which loads faster than GGUF.

    Args:
        source: as in `load_pretrained`.
        folder: as in `save_pretrained`.
        dtype: of the saved tensors; float32 represents all others exactly.
        with_tokenizer: as in `load_pretrained`.

    Returns:
        The model_type, as `save_pretrained`.

    Raises:
        ValueError: as both.
    """
    require_free(Path(folder))
    checkpoint = _open(Path(source))
    tokenizer = checkpoint.tokenizer() if with_tokenizer else None
    ids = {k: checkpoint.config[k] for k in TOKEN_IDS if k in checkpoint.config}
    model = _build(checkpoint, None)
    return _write(model, Path(folder), tokenizer, ids, dtype, SHARD_BYTES)


def _open(path: Path) -> SafetensorsFolder | GGUFCheckpoint:
    if path.is_dir():
        return SafetensorsFolder(path)
    if not path.is_file():
        raise ValueError(f"{path} is neither a folder nor a GGUF file")
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: give its folder, which has the config.json as well")
    # Before anything opens it: loading a pickle runs code.
    require_no_pickle(path)
    return GGUFCheckpoint(path)


def _build(
    checkpoint: SafetensorsFolder | GGUFCheckpoint, dtype: Dtype | None
) -> LanguageModel:
    where, shapes = str(checkpoint.path), checkpoint.shapes
    if checkpoint.config.get("model_type") == own_format.MODEL_TYPE:
        config = checkpoint.config
        return own_format.build_model(config, shapes, checkpoint.get, dtype, where)
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(shapes):
        # Checked before a model of so many layers is built.
        raise ValueError(
            f"{where}: num_hidden_layers={layers} in a checkpoint of "
            f"{len(shapes)} tensors"
        )
    try:
        config = from_hf_config(checkpoint.config, dtype or "float32")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    read = tensor_names.parameters_from_tensors
    return read(config, shapes, checkpoint.get, where)


def _write(
    model: nnx.Module,
    folder: Path,
    tokenizer: bytes | None,
    more: dict[str, Any],
    dtype: Dtype,
    shard_bytes: int,
) -> str:
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"model must be a LanguageModel, got {type(model).__name__}: a memory "
            "around a backbone is not part of these folders; save its backbone"
        )
    # No other program knows where our adapters are.
    model = merge_lora(model)
    try:
        config = to_hf_config(model.config)
        tensors = tensor_names.tensors_from_parameters(model)
    except ValueError:
        config, tensors = own_format.to_config(model), own_format.named_tensors(model)
    write_folder(
        folder,
        config | more,
        tensors,
        tokenizer,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    return config["model_type"]
