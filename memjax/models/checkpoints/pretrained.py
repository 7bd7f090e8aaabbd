"""Read pretrained models of Hugging Face folders, GGUF files and memjax's folders.

Nothing that is read is executed; `hf.safetensors_file`, `hf.safetensors_folder` and
`gguf.file` check every name, size and offset before it is used.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from memjax.checks import require_known
from memjax.models.checkpoints import own_format, own_model
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.hf import hub, parameters
from memjax.models.checkpoints.hf.config import from_hf_config, require_family
from memjax.models.checkpoints.hf.hybrids.files import text_config, text_tensors
from memjax.models.checkpoints.hf.known_keys import report_unread
from memjax.models.checkpoints.hf.safetensors_folder import (
    SafetensorsFolder,
    read_model_config,
    require_no_pickle,
)
from memjax.models.checkpoints.hf.safetensors_write import SAVED_DTYPES
from memjax.models.checkpoints.license import read_license
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel

#: Decays of recurrent memories and skips around them keep the digits that a file has:
#: they are few, and rounding one moves everything that a memory holds.
EXACT = (
    *("A_log", "dt_bias", "dt_proj.bias", ".D"),
    *("log_rate", "pace.bias", "pace_bias", ".skip"),
)
#: Called with how many tensors were read, and how many there are.
Progress = Callable[[int, int], None]


def unseen(done: int, total: int) -> None:
    """No progress report."""


def read_pretrained(
    found: hub.Location,
    *,
    dtype: Dtype | None,
    param_dtype: Dtype | None = None,
    with_tokenizer: bool = True,
    as_stored: bool = False,
    progress: Progress = unseen,
) -> tuple[LanguageModel, TextInterface, str, dict[str, str]]:
    """Model, text interface, origin and licence of a model without a memory.

    See `memjax.load`.

    Raises:
        ValueError: naming file, tensor, what was expected and found, if the files are
            not sound, describe a model that is not built here, or are of different
            models; also without an optional package that is needed.
    """
    if found.path.is_dir():
        config = read_model_config(found.path)
        if config.get("model_type") != own_format.MODEL_TYPE:
            # Before gigabytes are downloaded, and before what is inside is read.
            require_family(config, found.origin)
        hub.fetch_weights(found)
    checkpoint = _open(found.path)
    model = _build(checkpoint, dtype, param_dtype, as_stored, progress)
    if isinstance(checkpoint, GGUFCheckpoint):
        text = checkpoint.text_interface(with_tokenizer=with_tokenizer)
        terms = checkpoint.license
    else:
        text = read_text_interface(
            found.path, model.vocab_size, with_tokenizer=with_tokenizer
        )
        terms = read_license(found.path)
    made_from = checkpoint.config.get(own_format.ORIGIN)
    origin = str(made_from) if made_from else found.origin
    return model, text, origin, terms


def _open(path: Path) -> SafetensorsFolder | GGUFCheckpoint:
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: give its folder, which has the config.json as well")
    # Before anything opens it: loading a pickle runs code.
    require_no_pickle(path)
    return GGUFCheckpoint(path)


def _counted(get: Callable, total: int, progress: Progress) -> Callable:
    """Reads a tensor by name and reports progress."""
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
    as_stored: bool,
    progress: Progress,
) -> LanguageModel:
    where, shapes = str(checkpoint.path), checkpoint.shapes
    if param_dtype is not None:
        require_known("param_dtype", param_dtype, get_args(Dtype))
        saved = SAVED_DTYPES[param_dtype]

        def get(name):
            found = checkpoint.get_compact(name)
            if name.endswith(EXACT):
                return found
            return found.astype(saved, copy=False)
    else:
        get = checkpoint.get_compact if dtype == "bfloat16" else checkpoint.get
        narrow = as_stored or dtype == "bfloat16"
        if isinstance(checkpoint, GGUFCheckpoint) and not narrow:
            checkpoint.report_widening()
    if checkpoint.config.get("model_type") == own_format.MODEL_TYPE:
        config, get = checkpoint.config, _counted(get, len(shapes), progress)
        return own_model.build_model(config, shapes, get, dtype, where)
    try:
        described = text_config(checkpoint.config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    layers = described.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(shapes):
        # Checked before a model of that depth is built.
        raise ValueError(
            f"{where}: num_hidden_layers={layers} in a checkpoint of "
            f"{len(shapes)} tensors"
        )
    try:
        config = from_hf_config(checkpoint.config, dtype or "float32")
    except ValueError as error:
        gguf = isinstance(checkpoint, GGUFCheckpoint)
        found = checkpoint.explain(error) if gguf else error
        raise ValueError(f"{where}: {found}") from error
    report_unread(checkpoint.config, checkpoint.config["model_type"], where)
    family = described["model_type"]
    if described is not checkpoint.config:
        report_unread(described, family, f"{where}: text_config")
    shapes, of_text = text_tensors(family, config, shapes, get, where)
    read = _counted(of_text, len(shapes), progress)
    return parameters.parameters_from_tensors(
        config, shapes, read, where, family, as_stored=as_stored
    )
