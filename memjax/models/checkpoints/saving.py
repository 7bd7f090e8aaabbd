"""Save a language model as a folder of `config.json` and safetensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from memjax.buckets.bucket import on_disk
from memjax.checks import require_instance
from memjax.models.base import Sized, named_parameters
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf import tensor_names
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.safetensors_write import write_folder
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.language_model.config import Dtype, ModelConfig
from memjax_kernels._src.stored_product import Stored

#: Size of the largest file; more tensors go to several files.
SHARD_BYTES = 5 * 10**9


class Contents(NamedTuple):
    """Content of a model's folder.

    Attributes:
        config: of `config.json`.
        tensors: names and values, one by one.
        is_public: whether transformers has such a model.
    """

    config: dict[str, Any]
    tensors: Iterator[tuple[str, np.ndarray]]
    is_public: bool


def plain_contents(config: ModelConfig, model: nnx.Module) -> Contents:
    """Content of the folder of a language model without adapters.

    Of the family of `to_hf_config`, or in memjax's own format where no family has such
    a model, as those with the recurrent layers of papers.
    """
    if any(isinstance(leaf, Stored) for _, leaf in named_parameters(model)):
        raise ValueError(
            "model must not be loaded with for_generation=True, which keeps weights "
            "in the bits of their file, to be saved"
        )
    try:
        described = to_hf_config(config)
        tensors = tensor_names.tensors_from_parameters(config, model)
    except ValueError:
        described = own_format.to_config(config)
        return Contents(described, own_format.named_tensors(model), is_public=False)
    return Contents(described, tensors, is_public=True)


def saved_type(config: ModelConfig) -> str:
    """The model_type under which a model is saved."""
    try:
        return to_hf_config(config)["model_type"]
    except ValueError:
        return own_format.MODEL_TYPE


def write_contents(
    contents: Contents,
    folder: Path | str,
    text: TextInterface | None = None,
    *,
    origin: str = "",
    readme: str | None = None,
    dtype: Dtype = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Writes a model's folder; see `LanguageModel.save`."""
    text = TextInterface() if text is None else text
    require_instance("text", text, TextInterface)
    ids = text.config_entries() if contents.is_public else {}
    write_folder(
        on_disk(folder),
        contents.config | ids | own_format.origin_entry(origin),
        contents.tensors,
        text.files(readme, ids_in_config=contents.is_public),
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    return contents.config["model_type"]


class Savable(Sized):
    """A model that is saved by its `contents`."""

    def contents(self, dtype: Dtype) -> Contents:
        """Content of the folder of `save`, in `dtype`."""
        raise NotImplementedError

    def save(
        self,
        folder: Path | str,
        text: TextInterface | None = None,
        *,
        origin: str = "",
        readme: str | None = None,
        dtype: Dtype = "float32",
        shard_bytes: int = SHARD_BYTES,
    ) -> str:
        """Writes a folder that transformers loads, if it has such a model.

        Models of the families of `from_hf_config` have their tensor names. Others, as
        those with the recurrent layers of papers, are written for `memjax.load` alone.
        LoRA adapters are merged.

        Args:
            folder: must not exist, or be empty; it appears whole or not at all.
            text: tokenizer, chat template, and the makers' sampling; None is none.
            origin: the model that this one was made from; of a path the last part is
                written.
            readme: the model card, `README.md`; None is none.
            dtype: of the saved tensors.
            shard_bytes: size of the largest file; more tensors go to several files.

        Returns:
            The model_type: that of the family, or "memjax" for a model that
            transformers does not have.

        Raises:
            ValueError: if the folder is not empty.
        """
        return write_contents(
            self.contents(dtype),
            folder,
            text,
            origin=origin,
            readme=readme,
            dtype=dtype,
            shard_bytes=shard_bytes,
        )
