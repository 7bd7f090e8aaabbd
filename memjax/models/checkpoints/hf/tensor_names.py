"""Names and layouts of the parameters in Hugging Face's checkpoints.

Their matrices are [out, in] with joined heads. Ours are [in, out]; heads are an axis.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32

from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.models.checkpoints.hf.export import is_gemma, tied_in_file
from memjax.models.checkpoints.hf.hybrids.family import hybrid_family
from memjax.models.checkpoints.hf.hybrids.fla.bounds import joined_bounds
from memjax.models.checkpoints.hf.hybrids.names import hybrid_names
from memjax.models.checkpoints.hf.hybrids.tables import HYBRIDS
from memjax.models.checkpoints.hf.tensor import (
    Piece,
    Tensor,
    split_parameter,
    tensors_of,
    to_stored,
)
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import FeedForwardParams, LayerNormParams


def tensor_names(config: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """The tensor of every parameter, in the tree that `nnx.to_pure_dict` gives.

    `family` is the model_type of a hybrid's file; None is the one it is written as.
    """
    family = family or hybrid_family(config)
    if family in HYBRIDS:
        return hybrid_names(config, HYBRIDS[family])
    style = config.architecture
    opt = _is_opt(config)
    root = "model.decoder" if opt else "model"
    names = {
        "embedding": Tensor(f"{root}.embed_tokens.weight"),
        "blocks": {
            i: _block(config, i, f"{root}.layers.{i}") for i in range(config.num_layers)
        },
    }
    if style.norm_last:
        names["norm"] = _norm(config, f"{root}.{'final_layer_norm' if opt else 'norm'}")
    if not config.tied_head:
        names["head"] = Tensor("lm_head.weight", "into")
    if style.learned_positions:
        names["positions"] = Tensor(f"{root}.embed_positions.weight")
    if style.embedding_dim is not None:
        names["project_in"] = Tensor(f"{root}.project_in.weight", "into")
        names["project_out"] = Tensor(f"{root}.project_out.weight", "into")
    return names


def tensors_from_parameters(
    config: ModelConfig, model: nnx.Module
) -> Iterator[tuple[str, Float32[np.ndarray, "..."]]]:
    """Names and values for a checkpoint with the config of `to_hf_config`, one by one.

    A tied head with a scaled embedding becomes a matrix of its own.

    Raises:
        ValueError: if a family's file cannot have the parameters; see `joined_bounds`.
    """
    ours = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return _tensors(config, ours, joined_bounds(config, ours["blocks"]))


def _tensors(config, ours, joined):
    """`tensors_from_parameters`, with tensors that are `joined` already."""
    yield from joined.items()
    theirs = tensor_names(config)
    scaled = config.tied_head and not tied_in_file(config)
    if scaled:
        yield "lm_head.weight", np.asarray(ours["embedding"])
        ours["embedding"] = ours["embedding"] * ours["embedding"].shape[1] ** 0.5
    parts: dict[str, list[tuple[Piece, np.ndarray]]] = {}
    for tensor, value in zip(tensors_of(theirs), jax.tree.leaves(ours), strict=True):
        if joined and tensor.name.endswith("lower_bound"):
            continue
        stored = to_stored(np.asarray(value), tensor.layout)
        if not tensor.pieces:
            yield tensor.name, stored
        for piece, rows in split_parameter(tensor, stored):
            found = parts.setdefault(piece.name, [])
            found.append((piece, rows))
            if sum(len(each.rows) for each, _ in found) == piece.total:
                # Rows of [E, out, in] are those of its middle axis.
                axis = int(tensor.layout == "experts" and len(tensor.pieces) == 1)
                yield piece.name, _joined(parts.pop(piece.name), axis)


def _joined(found: list[tuple[Piece, np.ndarray]], axis: int) -> np.ndarray:
    """A tensor from the rows of several parameters."""
    (piece, first), *_ = found
    shape = list(first.shape)
    shape[axis] = piece.total
    whole = np.empty(shape, first.dtype)
    for each, rows in found:
        whole[(slice(None),) * axis + (each.rows,)] = rows
    return whole


def _block(config: ModelConfig, layer: int, at: str) -> dict[str, Any]:
    """The tensors of one layer."""
    heads, opt = config.layers[layer].attention, _is_opt(config)
    assert heads is not None
    hidden = config.architecture.feed_forward_bias

    # Typed as Any: they take the place of arrays in the parameters' NamedTuples.
    def into(name) -> Any:
        return Tensor(f"{at}.{name}.weight", "into")

    def bias(name, has) -> Any:
        return Tensor(f"{at}.{name}.bias", "flat") if has else None

    query, key, value = (f"self_attn.{name}_proj" for name in "qkv")
    output = "self_attn.out_proj" if opt else "self_attn.o_proj"
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    if opt:
        up, down = "fc1", "fc2"
    return {
        "mechanism": _present(
            AttentionParams(
                query=into(query),
                key=into(key),
                value=into(value),
                output=into(output)._replace(layout="out_of"),
                query_bias=bias(query, heads.qkv_bias),
                key_bias=bias(key, heads.qkv_bias),
                value_bias=bias(value, heads.qkv_bias),
                output_bias=bias(output, heads.output_bias),
                query_norm=_qk_norm(config, heads, f"{at}.self_attn.q_norm"),
                key_norm=_qk_norm(config, heads, f"{at}.self_attn.k_norm"),
            )
        ),
        "feed_forward": _present(
            FeedForwardParams(
                gate=None if opt else into(gate),
                up=into(up),
                down=into(down),
                gate_bias=bias(gate, hidden and not opt),
                up_bias=bias(up, hidden),
                down_bias=bias(down, hidden),
            )
        ),
        **{
            ours: _norm(config, f"{at}.{theirs}")
            for ours, theirs in _norm_names(config).items()
        },
    }


def _norm_names(config: ModelConfig) -> dict[str, str]:
    """Names of a layer's norms, by ours."""
    style = config.architecture
    if _is_opt(config):
        names = ("self_attn_layer_norm", "final_layer_norm")
    elif not style.norm_outputs:
        names = ("input_layernorm", "post_attention_layernorm")
    elif not style.norm_first:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    else:
        return {
            "mechanism_norm": "input_layernorm",
            "mechanism_output_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "feed_forward_output_norm": "post_feedforward_layernorm",
        }
    return dict(zip(("mechanism_norm", "feed_forward_norm"), names, strict=True))


def _qk_norm(config: ModelConfig, heads: HeadsConfig, name: str) -> Any:
    if heads.qk_norm == "none":
        return None
    if heads.qk_norm == "width":
        return Tensor(f"{name}.weight", "flat")
    return _norm(config, name)


def _norm(config: ModelConfig, name: str) -> Any:
    if is_gemma(config):
        return Tensor(f"{name}.weight", "less_one")
    if config.architecture.norm == "rms":
        return Tensor(f"{name}.weight")
    scale: Any = Tensor(f"{name}.weight")
    bias: Any = Tensor(f"{name}.bias")
    return _present(LayerNormParams(scale, bias))


def _present(names: Any) -> dict[str, Any]:
    """The fields of a NamedTuple that are there."""
    return {k: name for k, name in names._asdict().items() if name is not None}


def _is_opt(config: ModelConfig) -> bool:
    return config.architecture.norm == "layer"


def is_parameter(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is a parameter; see `parameters_from_tensors`."""
    copy = config.tied_head and name == "lm_head.weight"
    buffer = name.endswith("rotary_emb.inv_freq")
    version = _is_opt(config) and name.endswith("decoder.version")
    return not (copy or buffer or version)
