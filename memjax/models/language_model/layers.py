"""Decoder layers: norms and feed-forward around a mechanism.

Each is a function of its parameters; what a model lacks, as Llama lacks biases, is
None in them.

Shapes: D model, F hidden.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from memjax.mechanisms import Mechanism
from memjax.mechanisms.layers.norms import expand_leading_dims, rms_norm
from memjax.mechanisms.layers.projections import times
from memjax.models.language_model.config import BlockStyle, ModelConfig
from memjax.models.language_model.depth import Layer
from memjax.models.language_model.hidden.dense import (
    FeedForwardParams,
    feed_forward,
    init_feed_forward,
)
from memjax.models.language_model.hidden.experts import (
    ExpertsParams,
    experts,
    init_experts,
)
from memjax.models.remat import LAYER_INPUT
from memjax.nnx.params import as_arrays, as_params, params_key
from memjax_kernels._src.causal_attention import READS
from memjax_kernels._src.common.cpu import scale_channels, scale_rows
from memjax_kernels._src.common.partition import along_batch
from memjax_kernels._src.trellis.pallas_tpu import SAVED as TRELLIS

#: What `ModelConfig.remat_saves` names; attention's scores are no product of weights.
SAVED = {
    "input": None,
    "attention": jax.checkpoint_policies.save_only_these_names(READS, *TRELLIS),
    # Kernels name what their backward pass takes; nothing else here has a name.
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_any_names_but_these(LAYER_INPUT),
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
}


class LayerNormParams(NamedTuple):
    """Parameters of LayerNorm; those of RMSNorm are its scale."""

    scale: Float[Array, " D"]
    bias: Float[Array, " D"]


NormParams = Float[Array, " D"] | LayerNormParams


def init_norm(config: ModelConfig) -> NormParams:
    """A norm that scales by 1."""
    scale = jnp.ones(config.model_dim)
    if config.architecture.norm == "rms":
        return scale
    return LayerNormParams(scale, jnp.zeros(config.model_dim))


def normalize(
    params: NormParams | None, x: Float[Array, "*B D"], epsilon: float
) -> Float[Array, "*B D"]:
    """LayerNorm or RMSNorm by the parameters; the identity without."""
    if params is None:
        return x
    if isinstance(params, LayerNormParams):
        return layer_norm(x, params, epsilon)
    return rms_norm(x, params, epsilon)


def layer_norm(
    x: Float[Array, "*B D"], params: LayerNormParams, epsilon: float
) -> Float[Array, "*B D"]:
    """(x - mean(x)) / deviation(x) * scale + bias, in float32 inside."""
    high = x.astype(jnp.float32)
    # Centred first: E[x²] - E[x]² would cancel.
    high = high - high.mean(axis=-1, keepdims=True)
    variance = (high**2).mean(axis=-1, keepdims=True)
    high = scale_rows(high, jax.lax.rsqrt(variance + epsilon))
    high = scale_channels(high, params.scale)
    return (high + expand_leading_dims(params.bias, high)).astype(x.dtype)


class BlockParams(NamedTuple):
    """Parameters of one layer; None is what its style lacks."""

    mechanism: Any
    feed_forward: FeedForwardParams | ExpertsParams | None
    mechanism_norm: NormParams
    feed_forward_norm: NormParams | None
    mechanism_output_norm: NormParams | None = None
    feed_forward_output_norm: NormParams | None = None


class Block(nnx.Module):
    """One layer: a mechanism and a feed-forward, each with its norm and residual.

    Holds parameters only; the memory is an argument and a result.

    Example:
        state, h = block(block.init_state(batch), h)
    """

    def __init__(
        self,
        config: ModelConfig,
        mechanism: Mechanism,
        style: BlockStyle | None = None,
        *,
        key: PRNGKeyArray | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = config
        self.functions = mechanism
        self.style = style = config.style(0) if style is None else style
        keys = jax.random.split(params_key(key, rngs), 4)
        self.mechanism = nnx.data(as_params(mechanism.init_params(keys[0])))
        self.mechanism_norm = nnx.data(as_params(init_norm(config)))
        # Without norms before, these two are the norms of the outputs.
        both = style.norm_first and style.norm_outputs
        if both:
            self.mechanism_output_norm = nnx.data(as_params(init_norm(config)))
        if style.feed_forward == "none":
            return
        init = init_experts if style.experts else init_feed_forward
        hidden = init(config, style, keys[1:])
        self.feed_forward = nnx.data(as_params(hidden))
        self.feed_forward_norm = nnx.data(as_params(init_norm(config)))
        if both:
            self.feed_forward_output_norm = nnx.data(as_params(init_norm(config)))

    def init_state(self, batch: int) -> PyTree:
        """The mechanism's empty memory; every leaf has the batch first."""
        return self.functions.init_state(batch)

    def __call__(
        self, state: PyTree, h: Float[Array, "B T D"]
    ) -> tuple[PyTree, Float[Array, "B T D"]]:
        """Reads a segment into the memory; returns it and the layer's output."""
        mix = functools.partial(apply_or_step, self.functions)
        return run_block(self.config, mix, self.parameters(), state, h, self.style)

    def parameters(self) -> BlockParams:
        """The parameters, as `run_block` takes them."""

        def of(name) -> Any:
            return as_arrays(getattr(self, name)) if hasattr(self, name) else None

        return BlockParams(*map(of, BlockParams._fields))


def draw_block(
    config: ModelConfig, mechanism: Mechanism, style: BlockStyle, key: PRNGKeyArray
) -> Block:
    """A layer; where equal ones are a loop, one program draws each of them."""
    if not config.scan_layers:
        return Block(config, mechanism, style, key=key)
    return nnx.merge(*_drawn(config, mechanism, style, key))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(config, mechanism, style, key):
    return nnx.split(Block(config, mechanism, style, key=key))


def apply_or_step(
    mechanism: Mechanism, params: PyTree, state: PyTree, x: Float[Array, "B T D"]
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """`step` where T is 1, `apply` of any other segment."""
    # Decoding: `step` skips what `apply` does to lay tokens out in chunks.
    if x.shape[1] == 1:
        state, y = mechanism.step(params, state, x[:, 0])
        return state, y[:, None]
    return mechanism.apply(params, state, x)


def run_block(
    config: ModelConfig,
    mix: Callable[[Any, PyTree, Array], tuple[PyTree, Array]],
    parameters: BlockParams,
    memory: PyTree,
    h: Float[Array, "B T D"],
    style: BlockStyle,
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """One layer around `mix(mechanism parameters, memory, x) -> (memory, y)`.

    The style says where the norms are. On a mesh the stream between sublayers is
    divided along the batch, and parameters are gathered for their use.
    """
    norm = functools.partial(normalize, epsilon=config.norm_epsilon)
    hidden = parameters.feed_forward

    def read(x):
        after, y = mix(parameters.mechanism, memory, x)
        return along_batch(y), after

    def transform(x):
        assert hidden is not None
        run: Any = experts if style.experts else feed_forward
        return along_batch(run(config, style, hidden, x)), None

    def add(branch, h, first, output):
        """The stream with what a branch makes of it, and the branch's result."""
        before = first if style.norm_first else None
        y, result = branch(norm(before, h))
        # Without a norm before, it is that of the output (OLMo 2), or of the sum (OPT
        # 350m).
        behind = output if style.norm_first else first if style.norm_outputs else None
        h = h + times(norm(behind, y), config.architecture.residual_multiplier)
        after = style.norm_first or style.norm_outputs
        return h if after else norm(first, h), result

    h, memory = add(
        read,
        along_batch(h),
        parameters.mechanism_norm,
        parameters.mechanism_output_norm,
    )
    if hidden is not None:
        norms = parameters.feed_forward_norm, parameters.feed_forward_output_norm
        h, _ = add(transform, h, *norms)
    return memory, h


def run_layer(
    config: ModelConfig, mix: Callable, layer: Layer, h: Float[Array, "B T D"]
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """`run_block` with `mix(mechanism, params, memory, x)`, for `run_layers`.

    With `config.remat` the backward pass keeps the input of each layer, and computes a
    layer at a time.
    """
    mix_layer = functools.partial(mix, layer.mechanism)
    block = functools.partial(run_block, config, mix_layer, style=layer.style)
    if config.remat:
        block = jax.checkpoint(block, policy=SAVED[config.remat_saves])
    # Named, so that a memory around this model can offload it: see `remat`.
    return block(layer.params, layer.memory, checkpoint_name(h, LAYER_INPUT))
