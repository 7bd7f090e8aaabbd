"""Any model by its name, and any model into a folder.

open_model("runs/one")                      a run, trained or fine-tuned
open_model("HuggingFaceTB/SmolLM2-135M")    what `load_pretrained` reads
open_model("exported")                      what `save_model` wrote, HMT and M+ too
"""

import dataclasses
from pathlib import Path

from memjax.buckets.bucket import as_path
from memjax.config_io import AnyPath
from memjax.data import Tokenizer, load_tokenizer
from memjax.models import LanguageModel
from memjax.models.base import Model
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf import hub
from memjax.models.checkpoints.hf.safetensors_folder import CONFIG, read_model_config
from memjax.models.checkpoints.pretrained import (
    load_located,
    save_pretrained,
    saved_type,
)
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from memjax.models.hmt import checkpoint as hmt_checkpoint
from memjax.models.hmt.model import HMT
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.lora import merge_lora
from memjax.models.mplus.checkpoints import checkpoint as mplus_checkpoint
from memjax.models.mplus.model import MPlus
from memjax.training.config import RunConfig
from memjax.training.finetune.run import (
    SHIPPED,
    FinetuneRun,
    later_stage,
    load_model,
)
from memjax.training.run_folder import CHECKPOINTS


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model and all that its name stands for.

    Attributes:
        model: a `LanguageModel`, `HMT`, `MPlus` or `ReReadWindow`.
        text: tokenizer, chat template, and how to draw.
        origin: what the model, or its backbone, was made from: a path, or
            "owner/name@commit" of the hub; empty if a run began with random parameters.
        run: the record of the run that trained it; None of any other model.
    """

    model: Model
    text: TextInterface
    origin: str
    run: RunConfig | FinetuneRun | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model.

        Raises:
            ValueError: if it has none.
        """
        if self.text.tokenizer is None:
            raise ValueError(
                f"{self.origin} has no tokenizer: put its tokenizer.json beside it"
            )
        return self.text.tokenizer


def open_model(
    name: AnyPath | str, *, dtype: Dtype | None = None, with_tokenizer: bool = True
) -> OpenedModel:
    """Reads a model, whatever it is.

    Args:
        name: folder of a run, folder of safetensors, GGUF file, or a model of the hub;
            a run or folder may be of HMT or M+ too. See `load_pretrained`.
        dtype: of the activations; None is a run's own, and float32 of other models.
        with_tokenizer: False does not read it.

    Raises:
        ValueError: if there is no such model, or its files are not sound; on a dtype
            for a run.
    """
    path = as_path(name)
    if is_run(path):
        if dtype is not None:
            raise ValueError(f"dtype must be None for the run {path}, got {dtype!r}")
        run, model = load_model(path)
        origin = run.origin if isinstance(run, FinetuneRun) else ""
        return OpenedModel(model, run_text(run, later_stage(path) or path), origin, run)
    found = hub.locate(name)
    is_folder = (found.path / CONFIG).is_file()
    config = read_model_config(found.path) if is_folder else {}
    if hmt_checkpoint.CONFIG_KEY in config or mplus_checkpoint.RECORD in config:
        hub.fetch_weights(found)
        activations: Dtype = dtype or "float32"
        if hmt_checkpoint.CONFIG_KEY in config:
            model = hmt_checkpoint.load_hmt(found.path, dtype=activations)
        else:
            model = mplus_checkpoint.load_mplus(found.path, dtype=activations)
        text = read_text_interface(
            found.path, model.vocab_size, with_tokenizer=with_tokenizer
        )
        made_from = str(config.get(own_format.ORIGIN) or found.origin)
        return OpenedModel(model, text, made_from)
    loaded = load_located(found, dtype=dtype, with_tokenizer=with_tokenizer)
    return OpenedModel(loaded.model, loaded.text, loaded.origin)


def is_run(path: AnyPath) -> bool:
    """Whether a folder is of a run, trained from scratch or fine-tuned."""
    if (path / CHECKPOINTS).is_dir() or later_stage(path) is not None:
        return True
    # Before its first checkpoint a run has its configuration alone.
    file = path / CONFIG
    text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
    return '"loop"' in text and '"model_type"' not in text


def run_text(run: RunConfig | FinetuneRun, folder: AnyPath) -> TextInterface:
    """What stands between a run's model and text.

    Args:
        run: the record.
        folder: of the run, or of its last stage.
    """
    name = run.data.tokenizer
    if name in SHIPPED or isinstance(run, RunConfig):
        return TextInterface(load_tokenizer(name))
    # Beside the tokenizer lie the other files that came with the backbone.
    return read_text_interface(folder, run.model.vocab_size)


def save_model(
    model: Model,
    folder: Path,
    text: TextInterface,
    *,
    origin: str = "",
    readme: str | None = None,
    dtype: Dtype = "float32",
) -> None:
    """Writes a model as a folder of safetensors; see `save_pretrained`.

    HMT and M+ go under the names of their official programs. Adapters are merged.

    Raises:
        ValueError: if the folder is not empty, or the model is none of the library's.
    """
    if isinstance(model, HMT):
        hmt_checkpoint.save_hmt(
            model, folder, text, origin=origin, readme=readme, dtype=dtype
        )
    elif isinstance(model, MPlus):
        mplus_checkpoint.save_mplus(
            model, folder, text, origin=origin, readme=readme, dtype=dtype
        )
    else:
        save_pretrained(
            _plain(model), folder, text, origin=origin, readme=readme, dtype=dtype
        )


def model_type(model: Model) -> str:
    """The model_type under which `save_model` writes a model."""
    if isinstance(model, HMT):
        return hmt_checkpoint.MODEL_TYPE
    if isinstance(model, MPlus):
        return mplus_checkpoint.MODEL_TYPE
    return saved_type(_plain(model))


def plain_model(model: Model) -> LanguageModel:
    """The model without its memory: the backbone alone, adapters merged."""
    if isinstance(model, HMT):
        return hmt_checkpoint.plain_backbone(model)
    wraps = isinstance(model, MPlus | ReReadWindow)
    return merge_lora(model.backbone if wraps else _plain(model))


def _plain(model: Model) -> LanguageModel:
    if isinstance(model, ReReadWindow):
        raise ValueError(
            "model must be a LanguageModel, HMT or MPlus, got a ReReadWindow, which is "
            "a way of reading: export its backbone alone (--backbone-only)"
        )
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"model must be a LanguageModel, HMT or MPlus, got {type(model).__name__}"
        )
    return model
