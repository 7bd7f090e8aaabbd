"""Reads a GGUF file as a Hugging Face checkpoint: its configuration and tensor names.

llama.cpp stores the two channels that RoPE rotates together next to each other in
Llama's query and key projections. In Hugging Face's checkpoints, and in memjax, they
are half a head apart: reading permutes them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from memjax.models.checkpoints import gguf_tokenizer
from memjax.models.checkpoints.gguf_file import GGUFFile
from memjax.models.checkpoints.safetensors_file import BFLOAT16
from memjax.models.checkpoints.text_interface import (
    TextInterface,
    fitting_tokenizer,
    generation_config,
)

# general.architecture -> model_type and class of Hugging Face.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
# The published RoPE scaling of Llama 3.1 and 3.2. GGUF has only the factors by channel.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
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
            ValueError: as `GGUFFile`; or if the architecture is not known, an entry is
                missing or of another type, or tensors have no known role.
        """
        self.path = path
        self._file = GGUFFile(path)
        self._names = _hf_names(self._file)
        shapes = {n: r.shape for n, r in self._file.records.items()}
        self.shapes = {hf: shapes[own] for hf, own in self._names.items()}
        self.config = _config(self._file, self.shapes)

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """The tensor of a Hugging Face name, dequantised."""
        tensor = self._file.read(self._names[name])
        # llama.cpp permutes the projections of Llama alone.
        if self.config["model_type"] != "llama":
            return tensor
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        role = name.split(".")[-2]
        return _unpermute(tensor, self.config[heads[role]]) if role in heads else tensor

    def get_compact(self, name: str) -> np.ndarray:
        """As `get`, in bfloat16 where the file has no more digits."""
        tensor, file = self.get(name), self._file
        return tensor if file.is_precise(self._names[name]) else tensor.astype(BFLOAT16)

    def text_interface(self, *, with_tokenizer: bool = True) -> TextInterface:
        """Tokenizer, chat template and how to draw, as the metadata has them.

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
        index = lambda name: gguf_tokenizer.special_id(
            metadata, name, vocab_size, where
        )
        ends = [index(name) for name in ("eos", "eot", "eom")]
        entries = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
        values = {
            name: metadata.get(f"general.sampling.{key}")
            for name, key in entries.items()
        }
        generation = generation_config(
            [end for end in ends if end is not None],
            index("bos"),
            index("padding"),
            # Stored in float32: 0.6 is read as 0.6000000238418579.
            {
                name: float(str(np.float32(v))) if isinstance(v, float) else v
                for name, v in values.items()
                if v is not None
            },
            vocab_size,
            where,
        )
        return TextInterface(tokenizer or None, template, generation)


def _unpermute(
    rows: Float32[np.ndarray, "R ..."], heads: int
) -> Float32[np.ndarray, "R ..."]:
    """Channels 0, 2, 4, ... of each head first, then 1, 3, 5, ..."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_names(file: GGUFFile) -> dict[str, str]:
    """Hugging Face's name of every tensor -> its name in the file."""
    names, unknown = {}, []
    for own in file.records:
        # At most five digits: a name must not make a number of any size.
        layer = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", own)
        outside = re.fullmatch(r"(\w+)\.(weight)", own)
        if layer and layer[2] in LAYER:
            names[f"model.layers.{layer[1]}.{LAYER[layer[2]]}.{layer[3]}"] = own
        elif outside and outside[1] in OUTSIDE:
            names[f"{OUTSIDE[outside[1]]}.weight"] = own
        elif own != ROPE_FACTORS:
            unknown.append(own)
    if unknown:
        raise ValueError(f"{file.path} has tensors of no known role: {unknown}")
    if "model.embed_tokens.weight" not in names:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    return names


def _config(file: GGUFFile, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The `config.json` of the original model, from the metadata."""
    entry = _Entries(file)
    model_type, architecture = ARCHITECTURES[entry.prefix]
    embedding = shapes["model.embed_tokens.weight"]
    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = entry("attention.key_length", width // max(heads, 1))
    _require(
        entry,
        {
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "vocab_size": embedding[0],
            "expert_count": 0,
            "attention.sliding_window": 0,
        },
    )
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": embedding[0],
        "hidden_size": width,
        "intermediate_size": entry("feed_forward_length"),
        "num_hidden_layers": entry("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entry("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": entry("context_length"),
        "rms_norm_eps": entry.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": entry.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    scaling = _rope_scaling(entry, config)
    if scaling:
        config["rope_scaling"] = scaling
    if model_type == "llama":
        config["attention_bias"] = any(n.endswith("proj.bias") for n in shapes)
    return config


def _require(entry: "_Entries", values: Mapping[str, int]) -> None:
    """Raises ValueError for an entry that differs from what is supported here."""
    for key, expected in values.items():
        if entry(key, expected) != expected:
            raise ValueError(
                f"{entry.file.path}: {entry.prefix}.{key} must be {expected}, "
                f"got {entry(key)}"
            )


class _Entries:
    """Metadata entries of the architecture, each checked for its type."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))
        if self.prefix not in ARCHITECTURES:
            raise ValueError(
                f"{file.path}: general.architecture={self.prefix!r} is not read, "
                f"expected one of {tuple(ARCHITECTURES)}"
            )

    def __call__(self, key: str, default: int | None = None) -> int:
        found = self._find(key, default)
        if type(found) is not int or found < 0:
            raise ValueError(
                f"{self.file.path}: {self.prefix}.{key} must be a whole number, "
                f"got {found!r}"
            )
        return found

    def real(self, key: str, default: float | None = None) -> float:
        found = self._find(key, default)
        if type(found) not in (int, float):
            raise ValueError(
                f"{self.file.path}: {self.prefix}.{key} must be a number, got {found!r}"
            )
        # Stored in float32: 1e-5 is read as 9.999999747378752e-06.
        return float(str(np.float32(found)))

    def word(self, key: str, default: str) -> str:
        return str(self._find(key, default))

    def _find(self, key: str, default: Any) -> Any:
        found = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if found is None:
            raise ValueError(f"{self.file.path} lacks the entry {self.prefix}.{key}")
        return found


def _rope_scaling(entry: _Entries, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = entry.word("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": entry.real("rope.scaling.factor")}
    if kind != "none":
        raise ValueError(
            f"{entry.file.path}: {entry.prefix}.rope.scaling.type={kind!r} is not "
            "read, expected 'none' or 'linear'"
        )
    if ROPE_FACTORS not in entry.file.records:
        return None
    return _llama3_scaling(entry.file, config)


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Recovers Llama 3's published scaling from the factors by channel."""
    stored = file.read(ROPE_FACTORS)
    half = config["head_dim"] // 2
    scaling = LLAMA3_SCALING | {"factor": float(stored.max())}
    if stored.shape == (half,):
        inverse = config["rope_theta"] ** (-np.arange(half) / half)
        wavelength = 2 * np.pi / inverse
        # Rotations within the original context: fast channels have 4 or more.
        rotations = LLAMA3_SCALING["original_max_position_embeddings"] / wavelength
        fast = np.clip((rotations - 1) / (4 - 1), 0, 1)
        expected = 1 / (fast + (1 - fast) / scaling["factor"])
        if np.allclose(stored, expected, rtol=1e-5):
            return scaling
    raise ValueError(
        f"{file.path}: the factors of {ROPE_FACTORS!r} {list(stored.shape)} are not "
        "those of Llama 3.1, which are the only ones read"
    )
