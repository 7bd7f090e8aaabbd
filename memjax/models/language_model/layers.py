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
from jaxtyping import Array, Float, Key, PRNGKeyArray, PyTree

from memjax.mechanisms import Mechanism
from memjax.mechanisms.layers.norms import expand_leading_dims, rms_norm
from memjax.mechanisms.layers.projections import Adapted, linear
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.depth import Layer
from memjax.models.remat import LAYER_INPUT
from memjax.nnx.params import as_arrays, as_params, params_key
from memjax_kernels._src.causal_attention import READS
from memjax_kernels._src.common.cpu import scale_channels, scale_rows
from memjax_kernels._src.common.partition import along_batch

#: What `ModelConfig.remat_saves` names; attention's scores are no product of weights.
SAVED = {
    "input": None,
    "attention": jax.checkpoint_policies.save_only_these_names(READS),
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


class FeedForwardParams(NamedTuple):
    """SwiGLU or GEGLU, or two matrices around a ReLU, without a gate."""

    gate: Float[Array, "D F"] | Adapted | None
    up: Float[Array, "D F"] | Adapted
    down: Float[Array, "F D"] | Adapted
    gate_bias: Float[Array, " F"] | None = None
    up_bias: Float[Array, " F"] | None = None
    down_bias: Float[Array, " D"] | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        return "gate", "up", "down"


def init_norm(config: ModelConfig) -> NormParams:
    """A norm that scales by 1."""
    scale = jnp.ones(config.model_dim)
    if config.architecture.norm == "rms":
        return scale
    return LayerNormParams(scale, jnp.zeros(config.model_dim))


def init_feed_forward(config: ModelConfig, keys: Key[Array, "3"]) -> FeedForwardParams:
    """Draws the matrices from three keys, scaled by their fan-in; biases are 0."""
    gate_key, up_key, down_key = keys
    d, f = config.model_dim, config.hidden_dim
    draw = jax.nn.initializers.lecun_normal()
    gated = config.architecture.feed_forward != "relu"
    biased = config.architecture.feed_forward_bias
    return FeedForwardParams(
        gate=draw(gate_key, (d, f)) if gated else None,
        up=draw(up_key, (d, f)),
        down=draw(down_key, (f, d)),
        gate_bias=jnp.zeros(f) if gated and biased else None,
        up_bias=jnp.zeros(f) if biased else None,
        down_bias=jnp.zeros(d) if biased else None,
    )


def feed_forward(
    config: ModelConfig, params: FeedForwardParams, x: Float[Array, "*B D"]
) -> Float[Array, "*B D"]:
    """W_down (f(W_gate x) ∘ W_up x), or W_down relu(W_up x) without a gate."""
    up = linear(x, params.up, params.up_bias)
    if params.gate is None:
        hidden = jax.nn.relu(up)
    else:
        gate = linear(x, params.gate, params.gate_bias)
        gelu = config.architecture.feed_forward == "geglu"
        hidden = (jax.nn.gelu(gate) if gelu else jax.nn.silu(gate)) * up
    return linear(hidden, params.down, params.down_bias)


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
    """Parameters of one layer; output norms are None without `norm_outputs`."""

    mechanism: Any
    feed_forward: FeedForwardParams
    mechanism_norm: NormParams
    feed_forward_norm: NormParams
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
        *,
        key: PRNGKeyArray | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        self.config = config
        self.functions = mechanism
        keys = jax.random.split(params_key(key, rngs), 4)
        self.mechanism = nnx.data(as_params(mechanism.init_params(keys[0])))
        self.feed_forward = nnx.data(as_params(init_feed_forward(config, keys[1:])))
        self.mechanism_norm = nnx.data(as_params(init_norm(config)))
        self.feed_forward_norm = nnx.data(as_params(init_norm(config)))
        style = config.architecture
        # Without norms before, those two are the norms of the outputs.
        if style.norm_first and style.norm_outputs:
            self.mechanism_output_norm = nnx.data(as_params(init_norm(config)))
            self.feed_forward_output_norm = nnx.data(as_params(init_norm(config)))

    def init_state(self, batch: int) -> PyTree:
        """The mechanism's empty memory; every leaf has the batch first."""
        return self.functions.init_state(batch)

    def __call__(
        self, state: PyTree, h: Float[Array, "B T D"]
    ) -> tuple[PyTree, Float[Array, "B T D"]]:
        """Reads a segment into the memory; returns it and the layer's output."""
        mix = functools.partial(apply_or_step, self.functions)
        return run_block(self.config, mix, self.parameters(), state, h)

    def parameters(self) -> BlockParams:
        """The parameters, as `run_block` takes them."""
        return BlockParams(
            as_arrays(self.mechanism),
            as_arrays(self.feed_forward),
            as_arrays(self.mechanism_norm),
            as_arrays(self.feed_forward_norm),
            *(
                as_arrays(getattr(self, name))
                for name in ("mechanism_output_norm", "feed_forward_output_norm")
                if hasattr(self, name)
            ),
        )


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
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """One layer around `mix(mechanism parameters, memory, x) -> (memory, y)`.

    `Architecture` says where the norms are. On a mesh the stream between
    sublayers is divided along the batch, and parameters are gathered for their use.
    """
    mechanism, hidden, mechanism_norm, hidden_norm, mechanism_output, hidden_output = (
        parameters
    )
    norm = functools.partial(normalize, epsilon=config.norm_epsilon)

    def transform(x):
        return along_batch(feed_forward(config, hidden, x))

    def read(memory, x):
        memory, y = mix(mechanism, memory, x)
        return memory, along_batch(y)

    h = along_batch(h)
    match config.architecture.norm_first, config.architecture.norm_outputs:
        case True, False:
            memory, y = read(memory, norm(mechanism_norm, h))
            h = h + y
            h = h + transform(norm(hidden_norm, h))
        case True, True:
            # Gemma 3.
            memory, y = read(memory, norm(mechanism_norm, h))
            h = h + norm(mechanism_output, y)
            h = h + norm(hidden_output, transform(norm(hidden_norm, h)))
        case False, True:
            # OLMo 2.
            memory, y = read(memory, h)
            h = h + norm(mechanism_norm, y)
            h = h + norm(hidden_norm, transform(h))
        case _:
            # OPT 350m normalises after the residual sum.
            memory, y = read(memory, h)
            h = norm(mechanism_norm, h + y)
            h = norm(hidden_norm, h + transform(h))
    return memory, h


def run_layer(
    config: ModelConfig, mix: Callable, layer: Layer, h: Float[Array, "B T D"]
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """`run_block` with `mix(mechanism, params, memory, x)`, for `run_layers`.

    With `config.remat` the backward pass keeps the input of each layer, and computes a
    layer at a time.
    """
    mix_layer = functools.partial(mix, layer.mechanism)
    block = functools.partial(run_block, config, mix_layer)
    if config.remat:
        block = jax.checkpoint(block, policy=SAVED[config.remat_saves])
    # Named, so that a memory around this model can offload it: see `remat`.
    return block(layer.params, layer.memory, checkpoint_name(h, LAYER_INPUT))
