"""Load pretrained models by name, and save them as folders that other programs read.

    pretrained = load_pretrained("HuggingFaceTB/SmolLM2-135M")
    ids = pretrained.tokenizer.encode("It was")
    save_pretrained(pretrained.model, "mine", pretrained.text)

Nothing that is read is executed; `hf.safetensors_file`, `hf.safetensors_folder` and
`gguf.file` check every name, size and offset before it is used.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from flax import nnx

from memjax.checks import require_known
from memjax.data.documents.tokenizer import Tokenizer
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.hf import hub, tensor_names
from memjax.models.checkpoints.hf.config import from_hf_config, require_family
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.safetensors_folder import (
    SafetensorsFolder,
    read_model_config,
    require_no_pickle,
)
from memjax.models.checkpoints.hf.safetensors_write import (
    SAVED_DTYPES,
    require_free,
    write_folder,
)
from memjax.models.checkpoints.text_interface import (
    GenerationConfig,
    TextInterface,
    read_text_interface,
)
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.lora import merge_lora

SHARD_BYTES = 5 * 10**9
#: Called with how many tensors were read, and how many there are.
Progress = Callable[[int, int], None]


def unseen(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model and what stands between it and text.

    Attributes:
        model: the parameters.
        text: tokenizer, chat template, and how to draw.
        origin: path of the file or folder, "owner/name@commit" of a model of the hub;
            of a folder that memjax made, the model that it was made from.
    """

    model: LanguageModel
    text: TextInterface
    origin: str

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Encodes and decodes; None if there is none."""
        return self.text.tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja's source of how turns become a prompt; None without one."""
        return self.text.chat_template

    @property
    def generation(self) -> GenerationConfig:
        """Tokens that end a text, and how the model's makers draw."""
        return self.text.generation


def load_pretrained(
    name: Path | str,
    *,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    with_tokenizer: bool = True,
    progress: Progress = unseen,
) -> Pretrained:
    """Reads a model of a Hugging Face family, or one that `save_pretrained` wrote.

    Args:
        name: a folder of `config.json` and safetensors, a GGUF file, or a model of the
            hub, "owner/name" or "owner/name/file.gguf", at its newest commit or the one
            behind an "@".
        dtype: of the activations; None is the saved one of models that memjax saved in
            its own format, float32 of others.
        param_dtype: of the parameters. None is float32; with dtype="bfloat16" it is
            bfloat16 for what the file has in bfloat16 or quantized, without a copy in
            float32 of more than a tensor.
        with_tokenizer: False does not read it, which helps if its kind is unknown.
        progress: called with each tensor: how many were read, and how many there are.

    Raises:
        ValueError: naming file, tensor, what was expected and found, if the files are
            not sound, describe a model that is not built here, or are of different
            models; saying where it was looked for, if there is no such model; also
            without an optional package that is needed.
    """
    return load_located(
        hub.locate(name),
        dtype=dtype,
        param_dtype=param_dtype,
        with_tokenizer=with_tokenizer,
        progress=progress,
    )


def load_located(
    found: hub.Location,
    *,
    dtype: Dtype | None,
    param_dtype: Dtype | None = None,
    with_tokenizer: bool = True,
    progress: Progress = unseen,
) -> Pretrained:
    """`load_pretrained` of a model that was found already."""
    if found.path.is_dir():
        config = read_model_config(found.path)
        if config.get("model_type") != own_format.MODEL_TYPE:
            # Before gigabytes are downloaded, and before what is inside is read.
            require_family(config, found.origin)
        hub.fetch_weights(found)
    checkpoint = _open(found.path)
    model = _build(checkpoint, dtype, param_dtype, progress)
    if isinstance(checkpoint, GGUFCheckpoint):
        text = checkpoint.text_interface(with_tokenizer=with_tokenizer)
    else:
        text = read_text_interface(
            found.path, model.vocab_size, with_tokenizer=with_tokenizer
        )
    made_from = checkpoint.config.get(own_format.ORIGIN)
    return Pretrained(model, text, str(made_from) if made_from else found.origin)


def save_pretrained(
    model: nnx.Module,
    folder: Path | str,
    text: TextInterface | None = None,
    *,
    origin: str = "",
    readme: str | None = None,
    dtype: Dtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes a folder that transformers loads, if it has such a model.

    Models of the families of `from_hf_config` have their tensor names. Others, as all
    with recurrent layers, are written for `load_pretrained` alone. LoRA adapters are
    merged.

    Args:
        model: a LanguageModel; of HMT and M+ save the backbone.
        folder: must not exist, or be empty; it appears whole or not at all.
        text: tokenizer, chat template, and how to draw; None is none.
        origin: the model that this one was made from; of a path the last part is
            written.
        readme: the model card, `README.md`; None is none.
        dtype: of the saved tensors.
        shard_bytes: size of the largest file; more tensors go to several files.

    Returns:
        The model_type: that of the family, or "memjax" for a model that transformers
        does not have.

    Raises:
        ValueError: if the folder is not empty, or the model is no LanguageModel.
    """
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"model must be a LanguageModel, got {type(model).__name__}: a memory "
            "around a backbone is not part of these folders; save its backbone"
        )
    text = text or TextInterface()
    # No other program knows where our adapters are.
    model = merge_lora(model)
    if saved_type(model) == own_format.MODEL_TYPE:
        config, tensors = own_format.to_config(model), own_format.named_tensors(model)
    else:
        config = to_hf_config(model.config) | text.generation.token_ids
        tensors = tensor_names.tensors_from_parameters(model)
    write_folder(
        Path(folder),
        config | own_format.origin_entry(origin),
        tensors,
        text.files(readme),
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    return config["model_type"]


def saved_type(model: LanguageModel) -> str:
    """The model_type under which a model is saved."""
    try:
        return to_hf_config(model.config)["model_type"]
    except ValueError:
        return own_format.MODEL_TYPE


def convert(
    source: Path | str,
    folder: Path | str,
    *,
    dtype: Dtype = "float32",
    with_tokenizer: bool = True,
    progress: Progress = unseen,
) -> str:
    """Reads any source and writes it as a folder, which loads faster than GGUF.

    Args:
        source: as in `load_pretrained`.
        folder: as in `save_pretrained`.
        dtype: of the saved tensors; float32 represents all others exactly.
        with_tokenizer: as in `load_pretrained`.
        progress: as in `load_pretrained`.

    Returns:
        The model_type, as `save_pretrained`.

    Raises:
        ValueError: as both.
    """
    require_free(Path(folder))
    found = load_pretrained(source, with_tokenizer=with_tokenizer, progress=progress)
    return save_pretrained(
        found.model, folder, found.text, origin=found.origin, dtype=dtype
    )


def _open(path: Path) -> SafetensorsFolder | GGUFCheckpoint:
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: give its folder, which has the config.json as well")
    # Before anything opens it: loading a pickle runs code.
    require_no_pickle(path)
    return GGUFCheckpoint(path)


def _counted(get: Callable, total: int, progress: Progress) -> Callable:
    """Reads a tensor by its name, and says so."""
    count = itertools.count(1)

    def read(name):
        tensor = get(name)
        progress(next(count), total)
        return tensor

    return read


def _build(
    checkpoint: SafetensorsFolder | GGUFCheckpoint,
    dtype: Dtype | None,
    param_dtype: Dtype | None,
    progress: Progress,
) -> LanguageModel:
    where, shapes = str(checkpoint.path), checkpoint.shapes
    if param_dtype is not None:
        require_known("param_dtype", param_dtype, get_args(Dtype))
        saved = SAVED_DTYPES[param_dtype]
        get = lambda name: checkpoint.get_compact(name).astype(saved, copy=False)
    else:
        get = checkpoint.get_compact if dtype == "bfloat16" else checkpoint.get
    get = _counted(get, len(shapes), progress)
    if checkpoint.config.get("model_type") == own_format.MODEL_TYPE:
        config = checkpoint.config
        return own_format.build_model(config, shapes, get, dtype, where)
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
    return read(config, shapes, get, where)
