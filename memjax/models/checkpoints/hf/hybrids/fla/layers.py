"""Recurrent layers of flash-linear-attention's models, from `config.json`.

`FLA` has a function for each family; `model` reads the rest.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from memjax.checks import short
from memjax.mechanisms import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    GSAConfig,
    LinearAttentionConfig,
    RecurrentStyle,
)
from memjax.models.checkpoints.hf.fields import (
    read_entry,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids.fla.model import fla_epsilon, from_fla
from memjax.models.language_model.config import Dtype, ModelConfig

# Of the norm of all heads in GSA and HGRN2, whatever the file's others are.
NORM_OF_ALL_EPSILON = 1e-5
# Queries and keys of GLA and RetNet are the projections.
PLAIN: dict[str, Any] = {
    "conv_width": 0,
    "query_silu": False,
    "key_silu": False,
    "unit_norm": False,
}


def _gated_deltanet(config: Mapping[str, Any], layer: int) -> GatedDeltaNetConfig:
    heads, key_dim = (read_size(config, key) for key in ("num_heads", "head_dim"))
    expansion = read_entry(config, "expand_v", float, 2.0)
    value_dim = round(key_dim * expansion)
    if not math.isclose(value_dim, key_dim * expansion, rel_tol=1e-5):
        raise ValueError(
            f"expand_v must make a whole number of head_dim={key_dim}, got {expansion}"
        )
    return GatedDeltaNetConfig(
        model_dim=read_size(config, "hidden_size"),
        num_heads=read_size(config, "num_v_heads", heads),
        key_dim=key_dim,
        value_dim=value_dim,
        **_delta_rule(config, key_dim, heads, gated=True),
    )


def _delta_net(config: Mapping[str, Any], layer: int) -> DeltaNetConfig:
    require_value(config, "use_beta", True, default=True)
    require_value(config, "qk_norm", "l2", default="l2")
    require_value(config, "qk_activation", "silu", default="silu")
    sizes = _sizes(config, 1.0, 1.0)
    return DeltaNetConfig(
        **sizes, **_delta_rule(config, sizes["key_dim"], None, gated=False)
    )


def _delta_rule(
    config: Mapping[str, Any], key_dim: int, key_heads: int | None, gated: bool
) -> dict[str, Any]:
    """What DeltaNet and Gated DeltaNet share; `gated` is the default of `use_gate`."""
    require_value(config, "use_short_conv", True, default=True)
    gated = read_entry(config, "use_gate", bool, gated)
    negative = read_entry(config, "allow_neg_eigval", bool, False)
    style = RecurrentStyle(
        num_key_heads=key_heads,
        conv_width=read_size(config, "conv_size", 4),
        conv_value=True,
        query_scale=key_dim**-0.5,
        gate="silu" if gated else "none",
    )
    return {
        "norm_epsilon": fla_epsilon(config),
        "max_rate": 2.0 if negative else 1.0,
        "style": style,
    }


def _gla(config: Mapping[str, Any], layer: int) -> GLAConfig:
    _require_null(config, "clamp_min")
    return GLAConfig(
        **_sizes(config, 0.5, 1.0), **_plain_and_gated(config), gate_bias=True
    )


def _retnet(config: Mapping[str, Any], layer: int) -> LinearAttentionConfig:
    return LinearAttentionConfig(
        **_sizes(config, 1.0, 2.0), **_plain_and_gated(config), retention=True
    )


def _plain_and_gated(config: Mapping[str, Any]) -> dict[str, Any]:
    """What GLA and RetNet share."""
    _require_plain(config)
    _require_null(config, "feature_map")
    # Norm and gate apart have another name.
    for key in ("use_output_gate", "fuse_norm"):
        require_value(config, key, True, default=True)
    style = RecurrentStyle(**PLAIN, gate="silu")
    return {"norm_epsilon": fla_epsilon(config), "style": style}


def _gsa(config: Mapping[str, Any], layer: int) -> GSAConfig:
    _require_plain(config)
    require_value(config, "feature_map", "swish", default="swish")
    # The norm has as many channels as the model.
    for key in ("expand_v", "exapnd_v", "exapnd_k"):
        require_value(config, key, 1.0, default=1.0)
    sizes = _sizes(config, 1.0, 1.0)
    key_dim = sizes["key_dim"]
    slots = read_size(config, "num_slots", 64 if "num_slots" not in config else key_dim)
    return GSAConfig(
        **sizes,
        norm_epsilon=NORM_OF_ALL_EPSILON,
        slots=slots,
        damping=read_entry(config, "gate_logit_normalizer", float, 8.0),
        style=RecurrentStyle(
            conv_width=0,
            value_silu=True,
            unit_norm=False,
            # Scores have no scale, of which the cell's is the square root of K.
            query_scale=key_dim**-0.5,
            read_silu=True,
            norm="all",
            gate="none",
        ),
    )


def _hgrn2(config: Mapping[str, Any], layer: int) -> GLAConfig:
    _require_plain(config)
    width = read_size(config, "hidden_size")
    default = 128 if "expand_ratio" not in config else None
    key_dim = read_size(config, "expand_ratio", default or 0)
    heads = width // key_dim if key_dim else read_size(config, "num_heads")
    if not heads or width % heads or (key_dim or width // heads) * heads != width:
        raise ValueError(
            f"expand_ratio must divide hidden_size={width}, got {short(key_dim)} with "
            f"num_heads={short(config.get('num_heads'))}"
        )
    bounded = read_entry(config, "use_lower_bound", bool, True)
    return GLAConfig(
        model_dim=width,
        num_heads=heads,
        key_dim=width // heads,
        value_dim=width // heads,
        norm_epsilon=NORM_OF_ALL_EPSILON,
        tied_keys=True,
        # That of the first layer is 0.
        lower_bound=bounded and layer > 0,
        style=RecurrentStyle(**PLAIN | {"query_silu": True}, norm="all", gate="none"),
    )


def _require_plain(config: Mapping[str, Any]) -> None:
    """Raises ValueError for options of which no published model is known."""
    require_value(config, "use_short_conv", False, default=False)
    require_value(config, "elementwise_affine", True, default=True)
    heads = config.get("num_heads")
    if config.get("num_kv_heads") not in (None, heads):
        raise ValueError(
            f"num_kv_heads must be num_heads={short(heads)}, got "
            f"{short(config['num_kv_heads'])}"
        )


def _require_null(config: Mapping[str, Any], key: str) -> None:
    if config.get(key) is not None:
        raise ValueError(f"{key} must be null, got {short(config[key])}")


def _sizes(config: Mapping[str, Any], keys: float, values: float) -> dict[str, Any]:
    """Widths of the model and of a head; `keys` and `values` are default ratios."""
    width, heads = read_size(config, "hidden_size"), read_size(config, "num_heads")
    found = {"model_dim": width, "num_heads": heads}
    for name, key, default in (
        ("key_dim", "expand_k", keys),
        ("value_dim", "expand_v", values),
    ):
        ratio = read_entry(config, key, float, default)
        if int(width * ratio) % heads or width * ratio < heads:
            raise ValueError(
                f"{key} must make hidden_size={width} a multiple of "
                f"num_heads={heads}, got {ratio}"
            )
        found[name] = int(width * ratio) // heads
    return found


#: By `model_type`.
FLA: dict[str, Callable[[Mapping[str, Any], Dtype], ModelConfig]] = {
    "gated_deltanet": functools.partial(from_fla, _gated_deltanet),
    "delta_net": functools.partial(from_fla, _delta_net),
    "gla": functools.partial(from_fla, _gla),
    "gsa": functools.partial(from_fla, _gsa),
    "retnet": functools.partial(from_fla, _retnet, hidden_ratio=2),
    "hgrn2": functools.partial(from_fla, _hgrn2),
}
