"""A Llama-3-style decoder over any mixture of mechanisms.

    h ← h + mixer(norm(h));   h ← h + W_down (silu(W_gate norm(h)) ∘ W_up norm(h))

Grattafiori et al. (2024), https://arxiv.org/abs/2407.21783. The model is a function
of its state: `model(state, tokens) -> (state, logits)`, one mechanism state a layer.

Shapes: B batch, T time, D model, F hidden, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from memjax import mechanisms
from memjax.mechanisms import Mechanism
from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.elastic_memory import ElasticMemoryConfig
from memjax.mechanisms.recurrent_block import BlockConfig
from memjax.mechanisms.sliding_window import SlidingWindowConfig
from memjax.models.config import Mixer, ModelConfig

State = tuple[PyTree, ...]


class FeedForwardParams(NamedTuple):
    """SwiGLU."""

    gate: Float[Array, "D F"]
    up: Float[Array, "D F"]
    down: Float[Array, "F D"]


def build_mixer(config: ModelConfig, mixer: Mixer) -> Mechanism:
    """The mechanism of one layer, with the model's sizes."""
    heads: dict[str, Any] = dict(
        model_dim=config.model_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
    )
    block = BlockConfig(
        model_dim=config.model_dim,
        num_heads=config.num_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        norm_epsilon=config.norm_epsilon,
    )
    match mixer:
        case "attention":
            return mechanisms.attention(
                AttentionConfig(**heads, capacity=config.capacity)
            )
        case "sliding_window":
            return mechanisms.sliding_window(
                SlidingWindowConfig(**heads, window=config.window)
            )
        case "elastic_memory":
            options = vars(config.elastic)
            return mechanisms.elastic_memory(
                ElasticMemoryConfig(**heads, block=config.window, **options)
            )
        case "linear_attention":
            return mechanisms.linear_attention(block)
        case "mamba2":
            return mechanisms.mamba2(block)
        case "gla":
            return mechanisms.gla(block)
        case "deltanet":
            return mechanisms.deltanet(block)
        case "gated_deltanet":
            return mechanisms.gated_deltanet(block)
        case "ttt_linear":
            return mechanisms.ttt_linear(block, config.ttt)
        case "gsa":
            return mechanisms.gsa(block, config.slots)
        case "abc":
            return mechanisms.abc(block, config.slots)
        case "trellis":
            return mechanisms.trellis(block, config.slots, config.trellis)
        case "lattice":
            # Its queries and keys have one channel a slot.
            block = dataclasses.replace(block, key_dim=config.slots)
            return mechanisms.lattice(block, config.lattice)


class Block(nnx.Module):
    """Parameters of one layer: mixer, feed-forward, two norms."""

    def __init__(self, config: ModelConfig, mechanism: Mechanism, key: PRNGKeyArray):
        mixer_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        d, f = config.model_dim, config.hidden_dim
        draw = jax.nn.initializers.lecun_normal()
        self.mixer = nnx.Param(mechanism.init_params(mixer_key))
        self.feed_forward = nnx.Param(
            FeedForwardParams(
                gate=draw(gate_key, (d, f)),
                up=draw(up_key, (d, f)),
                down=draw(down_key, (f, d)),
            )
        )
        self.mixer_norm = nnx.Param(jnp.ones(d))
        self.feed_forward_norm = nnx.Param(jnp.ones(d))


class LanguageModel(nnx.Module):
    """Holds parameters only; the memory is an argument and a result.

    Example:
        model = LanguageModel(preset("elastic-tiny"), key=jax.random.key(0))
        state, logits = model(model.init_state(batch), tokens)
    """

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        embed_key, head_key, *block_keys = jax.random.split(key, len(config.mixers) + 2)
        v, d = config.vocab_size, config.model_dim
        self.config = config
        self.mechanisms = tuple(build_mixer(config, m) for m in config.mixers)
        self.embedding = nnx.Param(jax.random.normal(embed_key, (v, d)) * d**-0.5)
        self.blocks = nnx.List(
            Block(config, mechanism, block_key)
            for mechanism, block_key in zip(self.mechanisms, block_keys, strict=True)
        )
        self.norm = nnx.Param(jnp.ones(d))
        if not config.tied_head:
            draw = jax.nn.initializers.lecun_normal()
            self.head = nnx.Param(draw(head_key, (d, v)))

    def init_state(self, batch: int) -> State:
        """Empty memories, one a layer; every leaf has the batch first."""
        return tuple(m.init_state(batch) for m in self.mechanisms)

    def reset(self, state: State, mask: Bool[Array, " B"]) -> State:
        """Clears the memory of the rows in `mask`, at their document's start."""
        return mechanisms.reset(state, self.init_state(mask.shape[0]), mask)

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.config.vocab_size

    @property
    def window(self) -> int:
        """Tokens of a piece that is read quickly."""
        return self.config.window

    @property
    def width(self) -> int:
        """E, the width of `embed` and of the features."""
        return self.config.model_dim

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """What the first layer sees of each token.

        Tokens must be in [0, V): values are not checked inside jit, and one out of
        range makes its row NaN.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim != 2:
            raise ValueError(
                f"tokens must be integers [B, T], got {tokens.dtype}"
                f"{list(tokens.shape)}"
            )
        embedding = self.embedding.get_value()
        h = embedding.at[tokens].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )
        h = h.astype(self.config.dtype)
        if self.config.tied_head:
            # The embedding is drawn for the head; the stream wants unit variance.
            h = h * self.config.model_dim**0.5
        return h

    def read(
        self, state: State, x: Float[Array, "B T E"]
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads embeddings into the memories; returns what the head sees."""
        batch = jax.tree.leaves(state)[0].shape[0]
        if x.shape[0] != batch:
            raise ValueError(
                f"x must have {batch} rows, as the state has, got {x.shape[0]}"
            )
        h, after = x, []
        for block, mechanism, memory in zip(
            self.blocks, self.mechanisms, state, strict=True
        ):
            run = functools.partial(_block, mechanism, self.config.norm_epsilon)
            if self.config.remat:
                run = jax.checkpoint(run)
            parameters = (
                block.mixer.get_value(),
                block.feed_forward.get_value(),
                block.mixer_norm.get_value(),
                block.feed_forward_norm.get_value(),
            )
            memory, h = run(parameters, memory, h)
            after.append(memory)
        return tuple(after), rms_norm(
            h, self.norm.get_value(), self.config.norm_epsilon
        )

    def encode(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Features of a text that is read whole, of which nothing is kept."""
        return self.read(self.init_state(x.shape[0]), x)[1]

    def features(
        self, state: State, tokens: Int[Array, "B T"]
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads tokens, which must be in [0, V); see `embed` and `read`."""
        batch = jax.tree.leaves(state)[0].shape[0]
        if tokens.shape[:1] != (batch,):
            raise ValueError(
                f"tokens must be integers [B, T] with {batch} rows, as the state has, "
                f"got {tokens.dtype}{list(tokens.shape)}"
            )
        return self.read(state, self.embed(tokens))

    def logits(self, features: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        if self.config.tied_head:
            head = self.embedding.get_value().T
        else:
            head = self.head.get_value()
        head = head.astype(features.dtype)
        return jnp.matmul(features, head, preferred_element_type=jnp.float32)

    def __call__(
        self, state: State, tokens: Int[Array, "B T"]
    ) -> tuple[State, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B D"]:
    """x / rms(x) * scale, in float32 inside."""
    high = x.astype(jnp.float32)
    high = high * jax.lax.rsqrt((high**2).mean(axis=-1, keepdims=True) + epsilon)
    return (high * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def _block(mechanism, epsilon, parameters, memory, h):
    """One layer; a single token takes the mechanism's step."""
    mixer, feed_forward, mixer_norm, feed_forward_norm = parameters
    x = rms_norm(h, mixer_norm, epsilon)
    if x.shape[1] == 1:
        memory, y = mechanism.step(mixer, memory, x[:, 0])
        y = y[:, None]
    else:
        memory, y = mechanism.apply(mixer, memory, x)
    h = h + y
    x = rms_norm(h, feed_forward_norm, epsilon)
    gate, up, down = (w.astype(x.dtype) for w in feed_forward)
    return memory, h + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def with_config(model: LanguageModel, **changes: Any) -> LanguageModel:
    """The same parameters in a model whose config has these `changes`.

    Mixers may change to others with the same parameters: "attention" to
    "sliding_window" or "elastic_memory", say.

    Raises:
        ValueError: if a mixer of the new config has other parameters.
    """
    config = dataclasses.replace(model.config, **changes)
    rebuilt = nnx.merge(*nnx.split(model))
    rebuilt.config = config
    rebuilt.mechanisms = tuple(build_mixer(config, m) for m in config.mixers)
    shapes = lambda m: jax.eval_shape(m.init_params, jax.random.key(0))
    for old, new in zip(model.mechanisms, rebuilt.mechanisms, strict=True):
        if shapes(old) != shapes(new):
            raise ValueError(f"{changes} changes the parameters of a mixer")
    return rebuilt
