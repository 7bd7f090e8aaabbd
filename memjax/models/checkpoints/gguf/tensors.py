"""Names, shapes and numbers of a GGUF file's tensors, as Hugging Face has them.

llama.cpp stores some tensors otherwise. In the query and key projections of Llama and
SmolLM3 the two channels that RoPE rotates together are next to each other; in Hugging
Face's checkpoints, and in memjax, they are half a head apart: reading permutes them.
Scales of norms (Gemma 3, Qwen3.5) are stored with 1 added, which reading takes away,
and the rates of recurrent layers as A = -exp(A_log), of which reading takes the
logarithm. Qwen3.5's heads of values go round the heads of keys, (r, G) for r heads of
each of G; reading puts those of a key next to each other, (G, r).
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from memjax.models.checkpoints.gguf.architecture import Architecture
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.gguf.rope import ROPE_FACTORS
from memjax.models.checkpoints.hf.hybrids.names import part_rows

logger = logging.getLogger(__name__)

# At most five digits: a name must not make a number of any size.
LAYER = re.compile(
    r"blk\.(0|[1-9]\d{0,4})\.(((?:shortconv\.)?\w+)(\.weight|\.bias)?|nextn\..+)"
)
# Entries of the configuration with the heads of the projections that RoPE turns.
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
# Rows of these are of values, or follow those of queries and keys.
VALUE_ROWS = ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
MIXED_ROWS = ("attn_qkv", "ssm_conv1d")


class Part(NamedTuple):
    """A tensor of the file, or the matrix of one expert."""

    own: str
    expert: int | None = None


def hf_names(
    file: GGUFParts, architecture: Architecture, layers: int
) -> dict[str, list[Part]]:
    """Hugging Face's name of every tensor -> its parts in the file, in order.

    Tensors of layers beyond the first `layers` are reported and left out, where the
    architecture has such ones.

    Raises:
        ValueError: naming the tensors that have no known role, the parts of a tensor
            that are not as many as they must be, another number of experts than
            `expert_count`, or a missing embedding.
    """
    names: dict[str, list[Part]] = {}
    unknown, beyond = [], 0
    for own in file.records:
        layer = LAYER.fullmatch(own)
        if layer and architecture.extra and int(layer[1]) >= layers:
            beyond += 1
        elif (name := _hf_name(own, architecture)) is not None:
            for each, part in _experts(file, own, name):
                names.setdefault(each, []).append(part)
        elif own != ROPE_FACTORS:
            unknown.append(own)
    if unknown:
        raise ValueError(f"{file.path} has tensors of no known role: {unknown}")
    order = list(architecture.layer)
    for name, parts in names.items():
        _require_parts(file, architecture, name, parts)
        if len(parts) > 1:
            parts.sort(key=lambda part: order.index(_stem(part.own)))
    if f"{architecture.outside['token_embd']}.weight" not in names:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight'")
    if beyond:
        logger.warning(
            "%s: not read of its tensors: %d of the layers from %d on, which predict "
            "further tokens",
            *(file.path, beyond, layers),
        )
    return names


def _hf_name(own: str, architecture: Architecture) -> str | None:
    """Hugging Face's name of a tensor; None for one of no known role."""
    layer = LAYER.fullmatch(own)
    if layer is None:
        stem, _, suffix = own.rpartition(".")
        known = suffix == "weight" and stem in architecture.outside
        return f"{architecture.outside[stem]}.weight" if known else None
    number, rest, stem, suffix = layer.groups()
    at = f"{architecture.layers}.{number}"
    if rest in architecture.whole:
        return f"{at}.{architecture.whole[rest]}"
    if suffix and stem in architecture.layer:
        return f"{at}.{architecture.layer[stem]}{suffix}"
    return None


def _experts(file: GGUFParts, own: str, name: str) -> Iterator[tuple[str, Part]]:
    """Names and parts of all experts that a tensor has; of a plain one, its own."""
    if "{}" not in name:
        yield name, Part(own)
        return
    count, shape = Entries(file)("expert_count"), file.records[own].shape
    if len(shape) != 3 or shape[0] != count:
        raise ValueError(
            f"{file.path}: tensor {own!r} must have a matrix of each of {count} "
            f"experts, got the shape {list(shape)}"
        )
    for expert in range(count):
        yield name.format(expert), Part(own, expert)


def _require_parts(file, architecture, name, parts):
    """Raises ValueError unless a tensor has all of its parts, and each once."""
    (first, *_) = found = [part.own for part in parts]
    role = architecture.layer.get(_stem(first))
    needed = list(architecture.layer.values()).count(role) if role else 1
    if len(found) != needed:
        raise ValueError(
            f"{file.path} has {found} for {name!r}, expected {needed} tensors"
        )


def _stem(own: str) -> str:
    """A tensor's name without layer and ending."""
    layer = LAYER.fullmatch(own)
    return (layer and layer[3]) or own.removesuffix(".weight")


def hf_shape(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part in Hugging Face's checkpoints; `shape` is the tensor's."""
    if part.expert is not None:
        return shape[1:]
    stem = _stem(part.own)
    if stem == "ffn_gate_inp_shexp":
        return (1, math.prod(shape))
    if stem == "ssm_norm":
        return (math.prod(shape),)
    # Of heads; those of channels have no further axis.
    if stem in ("ssm_a", "ssm_d") and shape[1:] == (1,):
        return shape[:1]
    if stem in ("ssm_conv1d", "shortconv.conv") and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


def is_derived(own: str, architecture: Architecture) -> bool:
    """Whether reading computes other numbers than are stored, with more digits."""
    stem = _stem(own)
    return stem == "ssm_a" or (
        architecture.shifted and stem.endswith("norm") and stem != "ssm_norm"
    )


def restore(
    part: Part,
    stored: Float32[np.ndarray, "..."],
    architecture: Architecture,
    config: Mapping[str, Any],
) -> Float32[np.ndarray, "..."]:
    """A part of a tensor as Hugging Face has it.

    Args:
        part: what it is.
        stored: as in the file, dequantized.
        architecture: of the file.
        config: of the model.

    Raises:
        ValueError: for rates of a recurrent layer that are not negative.
    """
    if part.expert is not None:
        return stored
    stem, tensor = _stem(part.own), stored.reshape(hf_shape(part, stored.shape))
    if stem == "ssm_a":
        if not (tensor < 0).all():
            raise ValueError(f"{part.own!r} must be below 0, as -exp(A_log) is")
        tensor = np.log(-tensor)
    elif is_derived(part.own, architecture):
        tensor = tensor - 1
    if architecture.permuted and stem in HEADS:
        tensor = _unpermute(tensor, config[HEADS[stem]])
    return _untile(stem, tensor, config) if architecture.tiled else tensor


def join(
    name: str, parts: Sequence[Float32[np.ndarray, "..."]], config: Mapping[str, Any]
) -> Float32[np.ndarray, "..."]:
    """A tensor of Hugging Face from its parts, row by row."""
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts, axis=-2)
    if not name.endswith("in_proj_qkvz.weight"):
        return joined
    # Qwen3-Next has all rows of a head of keys before the next head's.
    groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    ways = config["linear_num_value_heads"] // groups
    value = ways * config["linear_value_head_dim"]
    widths = {"q": key, "k": key, "v": value, "z": value}
    rows, _ = part_rows(widths, groups, by_head=True)
    result = np.empty_like(joined)
    result[np.concatenate(list(rows.values()))] = joined
    return result


def _unpermute(
    rows: Float32[np.ndarray, "R ..."], heads: int
) -> Float32[np.ndarray, "R ..."]:
    """Channels 0, 2, 4, ... of each head first, then 1, 3, 5, ..."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _untile(stem, tensor, config):
    """Heads of values after one another for each head of keys."""
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]

    def grouped(rows):
        tiles = rows.reshape(heads // groups, groups, -1, *rows.shape[1:])
        return tiles.swapaxes(0, 1).reshape(rows.shape)

    if stem in VALUE_ROWS:
        return grouped(tensor)
    if stem in MIXED_ROWS:
        first = 2 * groups * config["linear_key_head_dim"]
        return np.concatenate([tensor[:first], grouped(tensor[first:])])
    # Its columns are the channels of values.
    return grouped(tensor.T).T if stem == "ssm_out" else tensor
