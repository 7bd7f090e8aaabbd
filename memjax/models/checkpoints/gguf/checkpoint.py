"""Reads a GGUF file as a Hugging Face checkpoint: its tensors under the names there."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from memjax.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from memjax.models.checkpoints.gguf.config import read_config
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.hybrids.sizes import read_layers
from memjax.models.checkpoints.gguf.known_architectures import read_architecture
from memjax.models.checkpoints.gguf.known_keys import check_keys
from memjax.models.checkpoints.gguf.option_keys import entries_named
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.gguf.tensors import (
    Part,
    hf_names,
    hf_shape,
    is_derived,
    join,
    restore,
)
from memjax.models.checkpoints.hf.generation_config import GenerationConfig
from memjax.models.checkpoints.hf.safetensors_file import BFLOAT16
from memjax.models.checkpoints.license import license_of_metadata
from memjax.models.checkpoints.text_interface import TextInterface, fitting_tokenizer

logger = logging.getLogger(__name__)

#: Settings of the sampler, and their names here.
SAMPLING_NAMES = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}


class GGUFCheckpoint:
    """Configuration and tensors of a GGUF file under Hugging Face's names.

    Attributes:
        path: of the file.
        config: content of the model's `config.json`.
        shapes: of the tensors, by Hugging Face's names.
    """

    def __init__(self, path: Path):
        """Reads the header.

        Raises:
            ValueError: as `GGUFParts`; or if the architecture is not known, an entry is
                missing, of another type or out of its range, or tensors have no
                known role.
        """
        self.path = path
        self._file = GGUFParts(path)
        self._architecture = read_architecture(self._file)
        check_keys(self._file.metadata, str(path))
        layers = read_layers(Entries(self._file))
        self._names = hf_names(self._file, self._architecture, layers)
        self.shapes = {name: self._shape(own) for name, own in self._names.items()}
        self.config = read_config(self._file, self.shapes)

    @property
    def license(self) -> dict[str, str]:
        """See `license.py`."""
        return license_of_metadata(self._file.metadata)

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """The tensor of a Hugging Face name, dequantised."""
        parts = [
            restore(own, self._file.read(*own), self._architecture, self.config)
            for own in self._names[name]
        ]
        return join(name, parts, self.config)

    def get_compact(self, name: str) -> np.ndarray:
        """`get` in bfloat16 where the file is no more precise."""
        tensor = self.get(name)
        precise = any(
            self._file.is_precise(own) or is_derived(own, self._architecture)
            for own, _ in self._names[name]
        )
        return tensor if precise else tensor.astype(BFLOAT16)

    def _shape(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """The shape of a tensor that has these parts in the file, row by row."""
        shapes = [hf_shape(part, self._file.records[part.own].shape) for part in parts]
        first = shapes[0]
        axis = max(len(first) - 2, 0)
        if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
            names = [part.own for part in parts]
            raise ValueError(f"{self.path}: rows of {names} differ in width: {shapes}")
        rows = sum(shape[axis] for shape in shapes)
        return (*first[:axis], rows, *first[axis + 1 :])

    def explain(self, error: ValueError) -> str:
        """The message of an error in `config`, with the file's own names."""
        return entries_named(str(error), self._file.metadata)

    def report_widening(self) -> None:
        """Logs the sizes of quantized weights in the file and in float32."""
        records = self._file.records.values()
        stored = sum(record.size for record in records)
        wide = 4 * sum(math.prod(record.shape) for record in records)
        if wide > 2 * stored:
            logger.warning(
                "%s: quantized weights of %.0f MB take %.0f MB in float32; half of it "
                'with param_dtype="bfloat16", or `--dtype bfloat16` of a command',
                *(self.path, stored / 1e6, wide / 1e6),
            )

    def text_interface(self, *, with_tokenizer: bool = True) -> TextInterface:
        """Tokenizer, chat template and sampling from the metadata.

        Raises:
            ValueError: if an entry is not sound, or the tokenizer is of an unknown kind
                or of another model.
        """
        metadata, where = self._file.metadata, str(self.path)
        vocab_size = self.config["vocab_size"]
        tokenizer = None
        if with_tokenizer:
            file = gguf_tokenizer.tokenizer_json(metadata, where)
            tokenizer = file and fitting_tokenizer(file, vocab_size, where)
        template = metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{where}: tokenizer.chat_template must be text")

        def index(name):
            return gguf_tokenizer.special_id(metadata, name, vocab_size, where)

        found = {name: metadata.get(own) for name, own in SAMPLING_NAMES.items()}
        # Stored in float32: 0.6 is read as 0.6000000238418579.
        record = {
            name: float(str(np.float32(value))) if isinstance(value, float) else value
            for name, value in found.items()
            if value is not None
        }
        # llama.cpp takes all tokens, and the likeliest, of numbers below 0 too.
        for name in record.keys() & {"top_k", "temperature"}:
            if type(record[name]) in (int, float):
                record[name] = max(record[name], 0)
        if record:
            record = {"do_sample": True, "top_k": 0} | record
        generation = GenerationConfig(
            tuple(dict.fromkeys(gguf_tokenizer.end_ids(metadata, vocab_size, where))),
            index("bos"),
            index("padding"),
            record,
            where,
            SAMPLING_NAMES,
        )
        return TextInterface(tokenizer or None, template, generation)
