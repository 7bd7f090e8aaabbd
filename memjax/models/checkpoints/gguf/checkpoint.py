"""Reads a GGUF file as a Hugging Face checkpoint: its tensors under the names there.

llama.cpp stores some tensors otherwise. In the query and key projections of Llama and
SmolLM3 the two channels that RoPE rotates together are next to each other; in Hugging
Face's checkpoints, and in memjax, they are half a head apart: reading permutes them.
The scales of Gemma 3's norms are stored with 1 added, which reading takes away.
"""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from memjax.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from memjax.models.checkpoints.gguf.config import (
    ROPE_FACTORS,
    read_architecture,
    read_config,
)
from memjax.models.checkpoints.gguf.known_keys import check_keys
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.hf.generation_config import GenerationConfig
from memjax.models.checkpoints.hf.safetensors_file import BFLOAT16
from memjax.models.checkpoints.license import license_of_metadata
from memjax.models.checkpoints.text_interface import TextInterface, fitting_tokenizer

logger = logging.getLogger(__name__)

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Without the norms around them, which differ between architectures.
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Entries of the configuration with the heads of the projections that RoPE turns.
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


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
        self._names = _hf_names(self._file, LAYER | self._architecture.norms)
        shapes = {n: r.shape for n, r in self._file.records.items()}
        self.shapes = {hf: shapes[own] for hf, own in self._names.items()}
        self.config = read_config(self._file, self.shapes)

    @property
    def license(self) -> dict[str, str]:
        """See `license.py`."""
        return license_of_metadata(self._file.metadata)

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """The tensor of a Hugging Face name, dequantised."""
        tensor = self._file.read(self._names[name])
        role = name.split(".")[-2]
        if self._architecture.permuted and role in HEADS:
            return _unpermute(tensor, self.config[HEADS[role]])
        return tensor - 1 if self._is_shifted(name) else tensor

    def get_compact(self, name: str) -> np.ndarray:
        """`get` in bfloat16 where the file is no more precise."""
        tensor, file = self.get(name), self._file
        # A difference may have more digits than what was stored.
        precise = file.is_precise(self._names[name]) or self._is_shifted(name)
        return tensor if precise else tensor.astype(BFLOAT16)

    def report_widening(self) -> None:
        """Logs the sizes of quantized weights in the file and in float32."""
        records = self._file.records.values()
        stored = sum(record.size for record in records)
        wide = 4 * sum(math.prod(record.shape) for record in records)
        if wide > 2 * stored:
            logger.warning(
                "%s: quantized weights of %.0f MB take %.0f MB in float32; half of it "
                'with param_dtype="bfloat16"',
                *(self.path, stored / 1e6, wide / 1e6),
            )

    def _is_shifted(self, name: str) -> bool:
        return self._architecture.shifted and name.endswith("norm.weight")

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

        entries = ("temp", "top_k", "top_p", "min_p")
        found = {name: metadata.get(f"general.sampling.{name}") for name in entries}
        # Stored in float32: 0.6 is read as 0.6000000238418579.
        record = {
            name.replace("temp", "temperature"): float(str(np.float32(value)))
            if isinstance(value, float)
            else value
            for name, value in found.items()
            if value is not None
        }
        if record:
            record = {"do_sample": True, "top_k": 0} | record
        generation = GenerationConfig(
            tuple(dict.fromkeys(gguf_tokenizer.end_ids(metadata, vocab_size, where))),
            index("bos"),
            index("padding"),
            record,
        )
        return TextInterface(tokenizer or None, template, generation)


def _unpermute(
    rows: Float32[np.ndarray, "R ..."], heads: int
) -> Float32[np.ndarray, "R ..."]:
    """Channels 0, 2, 4, ... of each head first, then 1, 3, 5, ..."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_names(file: GGUFParts, roles: Mapping[str, str]) -> dict[str, str]:
    """Hugging Face's name of every tensor -> its name in the file.

    `roles` has the names of a layer's tensors in the file -> Hugging Face's.
    """
    names, unknown = {}, []
    for own in file.records:
        # At most five digits: a name must not make a number of any size.
        layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", own)
        outside = re.fullmatch(r"(\w+)\.(weight)", own)
        if layer and layer[2] in roles:
            names[f"model.layers.{layer[1]}.{roles[layer[2]]}.{layer[3]}"] = own
        elif outside and outside[1] in OUTSIDE:
            names[f"{OUTSIDE[outside[1]]}.weight"] = own
        elif own != ROPE_FACTORS:
            unknown.append(own)
    if unknown:
        raise ValueError(f"{file.path} has tensors of no known role: {unknown}")
    if "model.embed_tokens.weight" not in names:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    return names
