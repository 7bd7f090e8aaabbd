"""Melodi: summary tokens of a block, mixed into memory tokens of the next one.

    y = attention of [x; u] to [m; x; u], causal         (m: all; u: learned, see all x)
    h = [x; u] + W_o y                                   out_t = W_o y_t of the tokens x
    m ← norm(h_u + mix)         mix = A norm(h) + a      A: [N, L + N], over tokens

x are the L tokens of a block, u its N summary tokens, m the N memory tokens, written
at the end of a block and read by the next. Where none is written, out_t is attention
inside the block. RoPE counts m, x and u from -N on. Chen et al. (2024),
https://arxiv.org/abs/2410.03156, section 3.

This is Melodi inside a layer, as the baseline of Elastic Memory (Song et al. 2026,
section 3.1). Melodi's own layers also hand u on to the layer above, through its
feed-forward; a mechanism sees one layer, so each has a u of its own here, and h is
without the feed-forward. Numbers in memory and mixture, and parameters, are those of
Song et al., tables 1 to 3: 2 N D and N D + (L + N) N, besides the N numbers of a.

Melodi's long-term layer is one layer of this kind, so a mechanism can be it: with
`long_tokens`, the mixture has that many more rows. At the end of a block norm(mix) of
those rows joins a queue, which holds the rows of the last `long_blocks` blocks. All
queries see the queue, without positions:

    y ← y + σ(b) (attention to the queue - y)            b: [H, K]

Elastic Memory's baseline has none.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
J = G K channels, L block, N memory tokens, P = N + long_tokens, M slots of the queue.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism, axes, check_input, replace_rows
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import places, projections
from memjax.mechanisms.layers.heads import HeadsConfig, mean_keys
from memjax.mechanisms.layers.norms import rms_norm
from memjax.mechanisms.layers.places import token_heads, token_rows
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax.mechanisms.layers.softmax import dot_product_attention as attend
from memjax_kernels._src.common.steps.in_place import change_if

#: Of the norms, which have no learned scale.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class MelodiConfig(HeadsConfig, MechanismDefaults):
    """Sizes of a layer of Melodi.

    Attributes:
        block: L, tokens with attention to each other; Elastic Memory's 2048.
        memory_tokens: N, memory tokens and summary tokens; 45 is Elastic Memory's 1x.
        long_tokens: tokens that a block adds to the long-term memory; 0 is a short-term
            layer. Melodi has 64 in its middle layer.
        long_blocks: blocks whose tokens the long-term memory holds.

    The block counter saturates at 2**30.
    """

    name: ClassVar[str] = "melodi"

    block: int = 2048
    memory_tokens: int = 45
    long_tokens: int = 0
    long_blocks: int = 128

    def __post_init__(self):
        super().__post_init__()
        check_sizes(block=self.block, memory_tokens=self.memory_tokens)
        check_sizes(least=0, long_tokens=self.long_tokens)
        check_sizes(long_blocks=self.long_blocks)

    @property
    def queue(self) -> int:
        """M."""
        return self.long_tokens * self.long_blocks

    @property
    def tokens_per_call(self) -> int:
        """A block."""
        return self.block

    def keys_per_query(self, length: int) -> float:
        """The block, and the memories where a block came before."""
        own = mean_keys(min(length, self.block), self.block)
        before = max(0.0, 1 - self.block / length)
        return own + (self.memory_tokens + self.queue) * before

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return Mechanism(
            init_params=functools.partial(init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
        )

    def param_axes(self) -> "MelodiParams":
        """Sharding axes of the parameters."""
        return MelodiParams(
            attention=projections.AXES,
            summary_prompt=axes(None, "model"),
            mixing=axes(),
            mixing_bias=axes(),
            gate_bias=axes("heads") if self.long_tokens else None,
        )


class MelodiParams(NamedTuple):
    """An attention layer's projections, the summary tokens and the mixture."""

    attention: AttentionParams
    summary_prompt: Float[Array, "N D"]  # u
    mixing: Float[Array, "S P"]  # A of all memories, transposed; S = L + N
    mixing_bias: Float[Array, " P"]
    gate_bias: Float[Array, "H K"] | None  # b; None without a long-term memory

    @property
    def lora_parts(self) -> tuple[str, ...]:
        """Parameters whose matrices LoRA may change."""
        return ("attention",)


class MelodiMemory(NamedTuple):
    """The memory that a block leaves to the next, in float32."""

    tokens: Float[Array, "B N D"]  # m
    mixed: Float[Array, "B P D"]  # the mixture of the open block's tokens so far
    long_keys: Float[Array, "B M J"] | None  # the newest last
    long_values: Float[Array, "B M J"] | None
    blocks: Int[Array, " B"]  # that have ended; saturates at 2**30


class MelodiState(NamedTuple):
    """The memory, and the tokens of the open block, zeros beyond `open_length`."""

    memory: MelodiMemory
    keys: Float[Array, "B L J"]  # without RoPE
    values: Float[Array, "B L J"]
    open_length: Int[Array, " B"]


def init_params(config: MelodiConfig, key: PRNGKeyArray) -> MelodiParams:
    """Draws all; u is like a token after the layer's norm."""
    attention_key, summary_key, mixing_key = jax.random.split(key, 3)
    rows = config.memory_tokens + config.long_tokens
    mix = jax.nn.initializers.lecun_normal()
    gate = (config.num_heads, config.head_dim)
    return MelodiParams(
        attention=projections.init_params(config, attention_key),
        summary_prompt=jax.random.normal(
            summary_key, (config.memory_tokens, config.model_dim)
        ),
        mixing=mix(mixing_key, (config.block + config.memory_tokens, rows)),
        mixing_bias=jnp.zeros(rows),
        gate_bias=jnp.zeros(gate) if config.long_tokens else None,
    )


def init_state(config: MelodiConfig, batch: int) -> MelodiState:
    """Returns empty memories and an empty block."""
    width = config.num_kv_heads * config.head_dim

    def zeros(*shape):
        return jnp.zeros((batch, *shape), jnp.float32)

    memory = MelodiMemory(
        tokens=zeros(config.memory_tokens, config.model_dim),
        mixed=zeros(config.memory_tokens + config.long_tokens, config.model_dim),
        long_keys=zeros(config.queue, width) if config.long_tokens else None,
        long_values=zeros(config.queue, width) if config.long_tokens else None,
        blocks=jnp.zeros(batch, jnp.int32),
    )
    return MelodiState(
        memory=memory,
        keys=zeros(config.block, width),
        values=zeros(config.block, width),
        open_length=jnp.zeros(batch, jnp.int32),
    )


def step(
    config: MelodiConfig,
    params: MelodiParams,
    state: MelodiState,
    x: Float[Array, "B D"],
) -> tuple[MelodiState, Float[Array, "B D"]]:
    """Attends from one token; summarises the block that it completes."""
    check_input(x, config.model_dim, state)
    token, place = x[:, None], state.open_length
    q, k, v = projections.qkv_projection(config, params.attention, token)
    # The token sees itself, so it is written before it attends.
    keys = places.lay_out(config.block, place, state.keys, token_rows(k))
    values = places.lay_out(config.block, place, state.values, token_rows(v))
    block = (
        token_heads(config, keys, x.dtype),
        token_heads(config, values, x.dtype),
    )
    y = _attend(config, params, state.memory, q, *block, place)
    y = projections.output_projection(params.attention, y, token)
    weights = params.mixing[place][:, None]
    memory = _mix(state.memory, token, y, weights)

    complete = place + 1 == config.block
    # Only one token in L completes a block: the others must not pay for its summary.
    end = functools.partial(_end, config)
    memory = change_if(end, jnp.any(complete), memory, params, *block, complete)
    keep = jnp.where(complete, 0.0, 1.0)[:, None, None]
    after = jnp.where(complete, 0, place + 1)
    return MelodiState(memory, keys * keep, values * keep, after), y[:, 0]


def apply(
    config: MelodiConfig,
    params: MelodiParams,
    state: MelodiState,
    x: Float[Array, "B T D"],
) -> tuple[MelodiState, Float[Array, "B T D"]]:
    """Attends block by block, each batch element at its own position in its block."""
    check_input(x, config.model_dim, state)
    # An open block of up to L-1 tokens may push the segment into one block more.
    blocks = (x.shape[1] + config.block - 2) // config.block + 1

    def read(blocks):
        return functools.partial(_read, config, blocks)

    if x.shape[1] % config.block:
        return read(blocks)(params, state, x)
    # In training: whole blocks, with none open before.
    whole = jnp.all(state.open_length == 0)
    exact = read(x.shape[1] // config.block)
    return jax.lax.cond(whole, exact, read(blocks), params, state, x)


def _read(config, blocks, params, state, x):
    """`apply` in the given number of blocks."""
    t, size, place = x.shape[1], blocks * config.block, state.open_length
    q, k, v = projections.qkv_projection(config, params.attention, x)
    lay_out = functools.partial(places.lay_out, size, place)
    keys, values = (
        lay_out(state.keys, token_rows(k)),
        lay_out(state.values, token_rows(v)),
    )

    def behind(tokens):
        """Tokens of this call alone: those before were answered."""
        return lay_out(jnp.zeros_like(tokens[:, :0], jnp.float32), tokens)

    slots = jnp.arange(size, dtype=jnp.int32)[None]
    is_new = (slots >= place[:, None]) & (slots < place[:, None] + t)
    count = (place + t) // config.block
    complete = jnp.arange(blocks, dtype=jnp.int32)[:, None] < count[None]

    def by_blocks(x):
        blocks_first = x.reshape(x.shape[0], -1, config.block, *x.shape[2:])
        return jnp.moveaxis(blocks_first, 1, 0)

    # The backward pass computes scores again: else those of all blocks are kept.
    @jax.checkpoint
    def read_block(memory, block):
        x, q, is_new, complete, k, v = block
        y = _attend(config, params, memory, q, k, v, jnp.zeros_like(place))
        y = projections.output_projection(params.attention, y, x)
        weights = params.mixing[None, : config.block]
        weights = jnp.where(is_new[..., None], weights, 0)
        memory = _mix(memory, x, y, weights)
        return _end(config, memory, params, k, v, complete), y

    tokens = (by_blocks(behind(leaf).astype(x.dtype)) for leaf in (x, q))
    block = (by_blocks(token_heads(config, leaf, x.dtype)) for leaf in (keys, values))
    memory, y = jax.lax.scan(
        read_block, state.memory, (*tokens, by_blocks(is_new), complete, *block)
    )
    y = places.take(jnp.moveaxis(y, 0, 1).reshape(x.shape[0], size, -1), place, t)
    ended = count * config.block
    return MelodiState(
        memory=memory,
        keys=places.take(keys, ended, config.block),
        values=places.take(values, ended, config.block),
        open_length=place + t - ended,
    ), y


def _attend(
    config: MelodiConfig,
    params: MelodiParams,
    memory: MelodiMemory,
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    place: Int[Array, " B"],
) -> Float[Array, "B Q H K"]:
    """Query t, at `place` + t of its block, sees the memories and the keys up to it."""
    weights, size = params.attention, config.memory_tokens
    tokens = memory.tokens.astype(q.dtype)
    past_key = projections.key_projection(config, weights, tokens)
    past_value = projections.linear(tokens, weights.value, weights.value_bias)
    positions = jnp.arange(-size, k.shape[1], dtype=jnp.int32)
    key = jnp.concatenate([past_key, k], axis=1)
    key = projections.apply_rope(config, key, positions)
    value = jnp.concatenate([past_value, v], axis=1)
    remembers = memory.blocks > 0
    visible = remembers[:, None] | (positions >= 0)[None]
    at = place[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    rotated = projections.apply_rope(config, q, at)
    y = attend.in_pieces(rotated, key, value, size + place, visible)
    if memory.long_keys is None or memory.long_values is None:
        return y

    key, value = (
        token_heads(config, leaf, q.dtype)
        for leaf in (memory.long_keys, memory.long_values)
    )
    slots = jnp.arange(config.queue, dtype=jnp.int32)
    back = config.long_blocks - slots // config.long_tokens
    filled = back[None] <= memory.blocks[:, None]
    every = jnp.full_like(place, config.queue)
    read = attend.in_pieces(q, key, value, every, filled)
    share = jax.nn.sigmoid(jnp.asarray(params.gate_bias, jnp.float32))[None, None]
    share = jnp.where(remembers[:, None, None, None], share, 0.0)
    return y + share.astype(y.dtype) * (read - y)


def _mix(
    memory: MelodiMemory,
    x: Float[Array, "B S D"],
    y: Float[Array, "B S D"],
    weights: Float[Array, "#B S P"],
) -> MelodiMemory:
    """The memory with h = x + y of some tokens in its mixture."""
    h = _norm(x.astype(jnp.float32) + y.astype(jnp.float32))
    weights = jnp.broadcast_to(weights, (x.shape[0], *weights.shape[1:]))
    mixed = jnp.einsum("bsd,bsp->bpd", h, weights.astype(jnp.float32))
    return memory._replace(mixed=memory.mixed + mixed)


def _end(
    config: MelodiConfig,
    memory: MelodiMemory,
    params: MelodiParams,
    k: Float[Array, "B L G K"],
    v: Float[Array, "B L G K"],
    complete: Bool[Array, " B"],
) -> MelodiMemory:
    """The memory after the block of these keys and values, where it is complete."""
    weights, size = params.attention, config.memory_tokens
    u = params.summary_prompt.astype(k.dtype)[None]
    u = jnp.broadcast_to(u, (k.shape[0], *u.shape[1:]))
    query, key, value = projections.qkv_projection(config, weights, u)
    key, value = jnp.concatenate([k, key], 1), jnp.concatenate([v, value], 1)
    place = jnp.full_like(memory.blocks, config.block)
    y = _attend(config, params, memory, query, key, value, place)
    y = projections.output_projection(weights, y, u)
    mixed = _mix(memory, u, y, params.mixing[None, config.block :]).mixed
    mixed = mixed + params.mixing_bias.astype(jnp.float32)[None, :, None]
    h = u.astype(jnp.float32) + y.astype(jnp.float32)
    ended = memory._replace(
        tokens=_norm(h + mixed[:, :size]),
        mixed=jnp.zeros_like(mixed),
        blocks=advanced(memory.blocks, 1),
    )
    if memory.long_keys is not None and memory.long_values is not None:
        new = _norm(mixed[:, size:]).astype(k.dtype)
        key = projections.key_projection(config, weights, new)
        value = projections.linear(new, weights.value, weights.value_bias)
        ended = ended._replace(
            long_keys=_queued(memory.long_keys, key),
            long_values=_queued(memory.long_values, value),
        )
    return replace_rows(memory, ended, complete)


def _queued(queue, new):
    """The queue with the new tokens at its end, without as many of the oldest."""
    return jnp.concatenate([queue[:, new.shape[1] :], token_rows(new)], axis=1)


def _norm(x):
    return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), EPSILON)
