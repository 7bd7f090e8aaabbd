"""Projections of a recurrent block: into queries, keys and values, and out of reads.

Shapes: B batch, T time, D model, H heads, G heads of queries and keys, K query and key,
V value, W width of the convolution, S projections that it filters (2, or 1 which query
and key share), R rank of the gate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from memjax.mechanisms.base import axes, check_input
from memjax.mechanisms.cells.base import Cell
from memjax.mechanisms.layers.convolution import draw_filters, last_inputs
from memjax.mechanisms.layers.gates import draw_weight, flat_product
from memjax.mechanisms.layers.norms import expand_leading_dims, rms_norm
from memjax.mechanisms.layers.projections import Adapted, linear, times
from memjax.mechanisms.layers.recurrent.style import RecurrentSizes
from memjax_kernels import gated_norm, l2_normalize, short_convolution
from memjax_kernels._src.common.partition import by_tokens, channels_by_heads

_ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class BlockParams(NamedTuple):
    """Learned parameters of a block and of its cell; None is what a style lacks."""

    query_key: Float[Array, "D S G K"] | Adapted
    filters: Float[Array, "W 2 G K"] | None
    value: Float[Array, "D H V"] | Adapted
    gate: Float[Array, "_ H V"] | Adapted | None
    norm: Float[Array, "*H V"] | None
    output: Float[Array, "H V D"] | Adapted
    cell: PyTree
    filter_bias: Float[Array, "2 G K"] | None = None
    value_filters: Float[Array, "W H V"] | None = None
    value_bias: Float[Array, "H V"] | None = None
    gate_narrow: Float[Array, "D R"] | None = None
    gate_bias: Float[Array, "H V"] | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        gate = () if self.gate is None else ("gate",)
        return ("query_key", "value", *gate, "output")


class BlockState(NamedTuple):
    """The memory, and the last inputs of the convolution, in float32.

    `values` are those of the values, where they are convolved.
    """

    window: Float[Array, "B _ S G K"]
    memory: PyTree
    values: Float[Array, "B _ H V"] | None = None


class QKV(NamedTuple):
    """Queries and keys, of unit norm unless the style says otherwise, and values."""

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]


class Unconvolved(NamedTuple):
    """Of q, k and v, what `memjax_kernels.convolved_gated_delta_rule` takes."""

    inputs: tuple[Array, Array, Array]
    filters: tuple[Array, Array, Array]
    before: tuple[Array, Array, Array]
    biases: tuple[Array, Array, Array] | None


_NORM_AXES = {
    "head": axes(),
    "group": axes("heads"),
    "all": axes("heads"),
    "none": None,
}


def param_axes(config: RecurrentSizes, cell: PyTree) -> BlockParams:
    """Sharding axes of the parameters, with those of the cell."""
    style = config.style
    bias, low_rank = style.conv_bias, style.gate_rank is not None
    of_gate = None if low_rank else "model"
    return BlockParams(
        query_key=axes("model", None, "heads"),
        filters=axes(None, None, "heads") if style.conv_width else None,
        value=axes("model", "heads"),
        gate=None if style.gate == "none" else axes(of_gate, "heads"),
        norm=_NORM_AXES[style.norm],
        output=axes("heads", None, "model"),
        cell=cell,
        filter_bias=axes(None, "heads") if bias else None,
        value_filters=axes(None, "heads") if style.conv_value else None,
        value_bias=axes("heads") if style.conv_value and bias else None,
        gate_narrow=axes("model") if low_rank else None,
        gate_bias=axes("heads") if low_rank else None,
    )


def init_params(
    config: RecurrentSizes, cell: Cell, projections: int, key: PRNGKeyArray
) -> BlockParams:
    """Draws the weights of the block and of its memory."""
    d, h, g = config.model_dim, config.num_heads, config.key_heads
    k, v = config.key_dim, config.value_dim
    style = config.style
    # Separate keys: with one seed, all mechanisms have the same block weights.
    keys = jax.random.split(key, 6)
    qk_key, filter_key, v_key, gate_key, out_key, cell_key = keys
    channels = jnp.ones((h, v))
    scales = {"head": jnp.ones(v), "group": channels, "all": channels, "none": None}
    biased, rank = style.conv_bias, style.gate_rank

    values_key = jax.random.fold_in(filter_key, 1)
    narrow_key = jax.random.fold_in(gate_key, 1)
    return BlockParams(
        query_key=draw_weight(qk_key, d, projections, g, k),
        filters=(
            draw_filters(filter_key, style.conv_width, 2, g, k)
            if style.conv_width
            else None
        ),
        value=draw_weight(v_key, d, h, v),
        gate=None if style.gate == "none" else draw_weight(gate_key, rank or d, h, v),
        norm=scales[style.norm],
        output=jax.random.normal(out_key, (h, v, d)) * (h * v) ** -0.5,
        cell=cell.init_params(cell_key),
        filter_bias=jnp.zeros((2, g, k)) if biased else None,
        value_filters=(
            draw_filters(values_key, style.conv_width, h, v)
            if style.conv_value
            else None
        ),
        value_bias=jnp.zeros((h, v)) if style.conv_value and biased else None,
        gate_narrow=draw_weight(narrow_key, d, rank) if rank else None,
        gate_bias=jnp.zeros((h, v)) if rank else None,
    )


def no_inputs(config, projections, batch):
    """Zeros for the inputs before a sequence, of queries and keys and of values."""
    style, taken = config.style, config.style.conv_inputs
    window = (batch, taken, projections, config.key_heads, config.key_dim)
    values = (batch, taken, config.num_heads, config.value_dim)
    no_values = jnp.zeros(values, jnp.float32) if style.conv_value else None
    return jnp.zeros(window, jnp.float32), no_values


def for_each_value(config, z):
    """Queries or keys [..., G, K] for each of the H heads of values."""
    ways = config.num_heads // config.key_heads
    return z if ways == 1 else jnp.repeat(z, ways, axis=-2)


def cell_input(config: RecurrentSizes, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The tokens as the cell's gates read them."""
    return times(x, config.style.cell_multiplier)


def qkv_projection(
    config: RecurrentSizes,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"] | None = None,
) -> tuple[BlockState, QKV]:
    """Queries, keys and values of a segment, in the dtype of x.

    `positions` of each token in its document, before which inputs of the convolution
    are zeros; None is one document. The state has the next inputs of the convolution.

    Raises:
        ValueError: unless x is floating, with the state's batch size and the model's
            width.
    """
    check_input(x, config.model_dim, state)
    style = config.style
    *inputs, v = _inputs(config, params, x)
    projections = len(inputs)
    before = [state.window[:, :, i] for i in range(projections)]
    # One projection that both share, or one for each. Unit norm bounds what a write can
    # do: a step of γ |k|² <= 2 does not diverge.
    activated = (style.query_silu, style.key_silu)

    def filtered(i):
        x, seen = inputs[i % projections], before[i % projections]
        if params.filters is None:
            return _activated(x, activated[i], style.unit_norm)
        return short_convolution(
            x,
            params.filters[:, i],
            seen,
            positions,
            bias=None if params.filter_bias is None else params.filter_bias[i],
            activation="silu" if activated[i] else "none",
            unit_norm=style.unit_norm,
        )

    q, k = filtered(0), filtered(1)
    window = jnp.stack(list(map(last_inputs, before, inputs)), axis=2)
    values = None
    if params.value_filters is not None:
        before_values = state.values
        assert before_values is not None
        values = last_inputs(before_values, v)
        v = short_convolution(
            v,
            params.value_filters,
            before_values,
            positions,
            bias=params.value_bias,
            unit_norm=False,
        )
    else:
        v = _activated(v, style.value_silu, unit_norm=False)
    q = times(q, style.query_scale)
    return BlockState(window, state.memory, values), QKV(q, k, v)


def unconvolved(
    config: RecurrentSizes,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> Unconvolved | None:
    """What `qkv_projection` convolves, if it is q, k and v, with silu and unit norm."""
    style = config.style
    usual = style.unit_norm and style.query_silu and style.key_silu
    filters, of_values, before = params.filters, params.value_filters, state.values
    if filters is None or of_values is None or before is None or not usual:
        return None
    check_input(x, config.model_dim, state)
    biases = None
    if params.filter_bias is not None:
        assert params.value_bias is not None
        biases = params.filter_bias[0], params.filter_bias[1], params.value_bias
    q, k, v = _inputs(config, params, x)
    return Unconvolved(
        inputs=(q, k, v),
        filters=(filters[:, 0], filters[:, 1], of_values),
        before=(state.window[:, :, 0], state.window[:, :, 1], before),
        biases=biases,
    )


def _inputs(config, params, x):
    """The projections before any convolution: of q and k, or of both, and of v."""
    style = config.style
    _, projections, groups, _ = part_shape(params.query_key)

    def project(weight, heads, factor=1.0):
        y = channels_by_heads(flat_product(x, weight), heads)
        return times(y.reshape(*x.shape[:2], heads, -1), factor)

    factors = (style.query_multiplier, style.key_multiplier)
    # Products of their own, where one would have to be cut again.
    inputs = [
        project(_part(params.query_key, i), groups, factors[i])
        for i in range(projections)
    ]
    return *inputs, project(params.value, config.num_heads, style.value_multiplier)


def _activated(x, silu, unit_norm):
    """Heads [B, T, H, K] without a convolution, in the dtype of x."""
    y = jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype) if silu else x
    return l2_normalize(y) if unit_norm else y


def part_shape(weight: Array | Adapted) -> tuple[int, ...]:
    """The shape of a weight [D, S, G, K], with LoRA or without."""
    return (weight.weight if isinstance(weight, Adapted) else weight).shape


def _part(weight, i):
    """One of the projections of a weight [D, S, G, K]."""
    if isinstance(weight, Adapted):
        return weight._replace(weight=weight.weight[:, i], up=weight.up[:, i])
    return weight[:, i]


def output_projection(
    config: RecurrentSizes,
    params: BlockParams,
    x: Float[Array, "*B D"],
    y: Float[Array, "*B H V"],
) -> Float[Array, "*B D"]:
    """Norm, gate and output matrix of the reads y of the tokens x."""
    style = config.style
    # RMSNorm makes the output independent of the memory's size, which grows with the
    # text.
    tokens = by_tokens(y if x.ndim == 3 else y[:, None])
    gate = None
    if params.gate is not None:
        gate = _gate(params, x).reshape(tokens.shape)
        gate = times(gate, style.gate_multiplier)
    if style.read_silu:
        tokens = jax.nn.silu(tokens.astype(jnp.float32))
    widths = {"group": config.num_heads // config.key_heads, "all": config.num_heads}
    joined = widths.get(style.norm, 1)
    if gate is not None and style.gate != "none" and params.norm is not None:
        tokens = gated_norm(
            tokens,
            gate,
            params.norm,
            config.norm_epsilon,
            activation=style.gate,
            gate_first=style.gate_first,
            heads_per_norm=joined,
        )
    elif gate is not None:
        tokens = tokens * _ACTIVATIONS[style.gate](gate.astype(jnp.float32))
    elif params.norm is not None:
        tokens = _norm(tokens, params.norm, config.norm_epsilon, joined)
    y = tokens.astype(x.dtype).reshape(*x.shape[:-1], *tokens.shape[2:])
    return linear(y, params.output, axes=2)


def _gate(params, x):
    """Logits of the output gate [*B, H V], in the dtype of x."""
    if params.gate_narrow is None:
        return flat_product(x, params.gate)
    logits = flat_product(flat_product(x, params.gate_narrow), params.gate)
    bias = params.gate_bias.reshape(-1).astype(x.dtype)
    return logits + expand_leading_dims(bias, logits)


def _norm(tokens, scale, epsilon, joined):
    """RMSNorm of `joined` neighbouring heads [B, T, H, V], without a gate."""
    scale = scale.reshape(-1, joined * scale.shape[-1])
    rows = tokens.reshape(*tokens.shape[:2], -1, joined * tokens.shape[-1])
    ones = jnp.ones(rows.shape[-1])
    normed = rms_norm(rows, ones, epsilon) * scale.astype(rows.dtype)[None, None]
    return normed.reshape(tokens.shape)
