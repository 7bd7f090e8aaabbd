"""Reads attention and recurrent layers of published models from `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from memjax.checks import short
from memjax.mechanisms import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba2Config,
    RecurrentStyle,
)
from memjax.models.checkpoints.hf.fields import (
    first_slots,
    read_entry,
    read_heads,
    read_rope,
    read_rope_dim,
    read_size,
    require_value,
)


def full_attention(
    config: Mapping[str, Any],
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    partial: float = 1.0,
    theta: float = 10_000.0,
    rope: bool = True,
    **options: Any,
) -> AttentionConfig:
    """Full attention; `partial` and `theta` are defaults of RoPE.

    A default of 1 is of families whose classes turn whole heads, whatever a file says.

    `kv_heads` where a family's default is another number than all heads.

    Without RoPE nothing depends on positions, and `max_position_embeddings` is no
    bound: it is the length of the training texts.
    """
    heads = read_heads(config)
    width = head_dim or read_size(
        config, "head_dim", read_size(config, "hidden_size") // heads
    )
    capacity = read_size(config, "max_position_embeddings")
    bias = read_entry(config, "attention_bias", bool, False)
    positions: dict[str, Any] = {"rope_theta": None}
    if rope:
        theta, scaling = read_rope(config, capacity, theta, partial=partial < 1)
        turned = read_rope_dim(config, width, partial) if partial < 1 else width
        positions = {"rope_theta": theta, "rope_scaling": scaling}
        positions |= {} if turned == width else {"rope_dim": turned}
    return AttentionConfig(
        model_dim=read_size(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads or read_size(config, "num_key_value_heads", heads),
        head_dim=width,
        qkv_bias=bias,
        output_bias=bias,
        capacity=capacity,
        initial_slots=first_slots(capacity),
        bounded=rope,
        **positions,
        **options,
    )


def gated_deltanet(
    config: Mapping[str, Any],
    epsilon: float,
    max_rate: float = 1.0,
    *,
    heads: int | None = None,
    key_dim: int | None = None,
) -> GatedDeltaNetConfig:
    """A layer whose keys begin with linear_; `epsilon` is of its norm.

    `heads` is a default, and twice `key_dim` that of values; None must be given.
    """
    double = 2 * key_dim if key_dim else None
    key_dim = key_dim or read_size(config, "linear_key_head_dim")
    return GatedDeltaNetConfig(
        model_dim=read_size(config, "hidden_size"),
        num_heads=read_size(config, "linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=read_size(config, "linear_value_head_dim", double),
        norm_epsilon=epsilon,
        max_rate=max_rate,
        style=RecurrentStyle(
            num_key_heads=read_size(config, "linear_num_key_heads", heads),
            conv_width=read_size(config, "linear_conv_kernel_dim", 4),
            conv_value=True,
            query_scale=key_dim**-0.5,
            gate="silu",
        ),
    )


def mamba_of_layer(
    config: Mapping[str, Any], inner: int | None = None, **style: Any
) -> Mamba2Config:
    """A Mamba-2 layer whose keys begin with mamba_."""
    require_value(config, "mamba_proj_bias", False, default=False)
    heads = read_size(config, "mamba_n_heads", 128)
    if inner is None:
        inner = read_size(config, "mamba_expand", 2) * read_size(config, "hidden_size")
    automatic = config.get("mamba_d_head", "auto") == "auto"
    width = inner // heads if automatic else read_size(config, "mamba_d_head")
    if width * heads != inner:
        raise ValueError(
            f"mamba_d_head must be {inner} / mamba_n_heads={heads}, got {width}"
        )
    return mamba2(
        config,
        heads=heads,
        width=width,
        state=read_size(config, "mamba_d_state", 256),
        groups=read_size(config, "mamba_n_groups", 1),
        taps=read_size(config, "mamba_d_conv", 4),
        bias=read_entry(config, "mamba_conv_bias", bool, True),
        epsilon=read_epsilon(config),
        **style,
    )


def mamba2(
    config: Mapping[str, Any],
    *,
    heads: int,
    width: int,
    state: int,
    groups: int,
    taps: int,
    bias: bool,
    epsilon: float,
    **style: Any,
) -> Mamba2Config:
    """A layer of published Mamba-2, and what its style has otherwise."""
    options = {"norm": "group", "gate_first": True} | style
    return Mamba2Config(
        model_dim=read_size(config, "hidden_size"),
        num_heads=heads,
        key_dim=state,
        value_dim=width,
        norm_epsilon=epsilon,
        pace_limits=pace_limits(config),
        style=RecurrentStyle(
            num_key_heads=groups,
            conv_width=taps,
            conv_value=True,
            conv_bias=bias,
            unit_norm=False,
            gate="silu",
            **options,
        ),
    )


def pace_limits(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """`time_step_limit`; None without a limit.

    transformers 5 writes infinity as a record.
    """
    given = read_entry(config, "time_step_limit", list, [0.0, math.inf])
    numbers: list[Any] = [
        float(x["__float__"]) if isinstance(x, dict) and "__float__" in x else x
        for x in given
    ]
    if len(numbers) != 2 or not all(type(x) in (int, float) for x in numbers):
        raise ValueError(f"time_step_limit must be two numbers, got {short(given)}")
    low, high = map(float, numbers)
    return None if (low, high) == (0, math.inf) else (low, high)


def floats(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """A list of numbers; ones where it is missing."""
    given = read_entry(config, key, list, [1.0] * count)
    if len(given) != count or not all(type(x) in (int, float) for x in given):
        raise ValueError(f"{key} must be {count} numbers, got {short(given)}")
    return tuple(map(float, given))


def require_silu(config: Mapping[str, Any]) -> None:
    """Raises ValueError for another activation."""
    require_value(config, "hidden_act", "silu", default="silu")


def read_epsilon(config: Mapping[str, Any]) -> float:
    """Of the model's norms; the defaults of families differ, so it must be given."""
    return read_entry(config, "rms_norm_eps", float)
