"""Memorizing Transformer: attention inside a block, and to a queue of earlier tokens.

    a_t = attention of q_t to the tokens of its own block up to t      (RoPE on q and k)
    r_t = attention of q_t to the N tokens before the block            (no positions)
    out_t = W_o (a_t + g (r_t - a_t))                                  g = σ(b)

A block's keys and values join the queue when it ends, and the oldest leave. b is one
number a head, learned; where nothing is in the queue, out_t = W_o a_t. Wu et al.
(2022), https://arxiv.org/abs/2203.08913, section 3. There a query sees its k nearest
tokens of the queue, found approximately, and no gradient reaches them. As baseline of
Elastic Memory (Song et al. 2026, section 3.1) it sees all, and gradients reach all that
the same call has read: `top_k=None`. With `top_k` the nearest are exact, for each head.

The paper's section has two more parts, which that baseline has not: unit norm of
queries and keys (`qk_norm="head"` is RMSNorm of both), and Transformer-XL's cache of
the block before.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
J = G K channels, L block, N queue, S = N + L slots, n blocks.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism, axes, check_input
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import places, projections
from memjax.mechanisms.layers.heads import HeadsConfig, mean_keys
from memjax.mechanisms.layers.places import token_heads, token_rows
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax.mechanisms.layers.softmax import dot_product_attention as attend


@dataclasses.dataclass(frozen=True)
class MemorizingConfig(HeadsConfig, MechanismDefaults):
    """Sizes of a layer of the Memorizing Transformer.

    Attributes:
        block: L, tokens with attention to each other; Elastic Memory's 2048.
        queue: N, tokens before the block that queries see; 540 keeps as many numbers
            as Elastic Memory's 1x memory does.
        top_k: tokens of the queue that a query of a head sees: those of the largest
            scores, and any that equal the least of these; None is the whole queue.

    The token counter saturates at 2**30.
    """

    name: ClassVar[str] = "memorizing"

    block: int = 2048
    queue: int = 540
    top_k: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_sizes(block=self.block, queue=self.queue)
        if self.top_k is not None:
            check_sizes(top_k=self.top_k)
            if self.top_k > self.queue:
                raise ValueError(
                    f"top_k must be at most queue={self.queue}, got {self.top_k}"
                )

    @property
    def tokens_per_call(self) -> int:
        """A block."""
        return self.block

    def keys_per_query(self, length: int) -> float:
        """The block, and what the queue holds of the blocks before."""
        own = mean_keys(min(length, self.block), self.block)
        queued = (
            min(self.queue, start) * min(self.block, length - start)
            for start in range(0, length, self.block)
        )
        return own + sum(queued) / length

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return Mechanism(
            init_params=functools.partial(init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
        )

    def param_axes(self) -> "MemorizingParams":
        """Sharding axes of the parameters."""
        return MemorizingParams(projections.AXES, axes("heads"))


class MemorizingParams(NamedTuple):
    """An attention layer's projections, and the gate of each head."""

    attention: AttentionParams
    gate_bias: Float[Array, " H"]  # b; its sigmoid is the queue's share

    @property
    def lora_parts(self) -> tuple[str, ...]:
        """Parameters whose matrices LoRA may change."""
        return ("attention",)


class MemorizingState(NamedTuple):
    """The N tokens before the block, then those of the block; zeros where none are."""

    keys: Float[Array, "B S J"]  # without RoPE
    values: Float[Array, "B S J"]
    length: Int[Array, " B"]  # tokens before the block; saturates at 2**30
    open_length: Int[Array, " B"]  # tokens of the block


def init_params(config: MemorizingConfig, key: PRNGKeyArray) -> MemorizingParams:
    """Draws the projections; the queue's share is a half at first."""
    attention = projections.init_params(config, key)
    return MemorizingParams(attention, jnp.zeros(config.num_heads))


def init_state(config: MemorizingConfig, batch: int) -> MemorizingState:
    """Returns the empty queue and an empty block."""
    slots = config.queue + config.block
    shape = (batch, slots, config.num_kv_heads * config.head_dim)
    return MemorizingState(
        keys=jnp.zeros(shape, jnp.float32),
        values=jnp.zeros(shape, jnp.float32),
        length=jnp.zeros(batch, jnp.int32),
        open_length=jnp.zeros(batch, jnp.int32),
    )


def step(
    config: MemorizingConfig,
    params: MemorizingParams,
    state: MemorizingState,
    x: Float[Array, "B D"],
) -> tuple[MemorizingState, Float[Array, "B D"]]:
    """Attends from one token; queues the block that it completes."""
    check_input(x, config.model_dim, state)
    x = x[:, None]
    q, k, v = projections.qkv_projection(config, params.attention, x)
    place = state.open_length
    # The token sees itself, so it is written before it attends.
    keys, values = (
        places.lay_out(kept.shape[1], config.queue + place, kept, token_rows(new))
        for kept, new in ((state.keys, k), (state.values, v))
    )
    key, value = (
        token_heads(config, leaf[:, config.queue :], q.dtype) for leaf in (keys, values)
    )
    slots = jnp.arange(config.block, dtype=jnp.int32)
    local = attend.masked_with_mass(
        projections.apply_rope(config, q, place[:, None]),
        projections.apply_rope(config, key, slots),
        value,
        (slots[None] <= place[:, None])[:, None],
    )[0]
    key, value = (
        token_heads(config, leaf[:, None, : config.queue], q.dtype)
        for leaf in (keys, values)
    )
    before = state.length[:, None]
    read = _from_queue(config, q[:, None], key, value, before)
    y = _gated(params, local[:, None], read, before)[:, 0]
    y = projections.output_projection(params.attention, y, x)[:, 0]
    return _after(config, state, keys, values, 1), y


def apply(
    config: MemorizingConfig,
    params: MemorizingParams,
    state: MemorizingState,
    x: Float[Array, "B T D"],
) -> tuple[MemorizingState, Float[Array, "B T D"]]:
    """Attends block by block, each batch element at its own position in its block."""
    check_input(x, config.model_dim, state)
    q, k, v = projections.qkv_projection(config, params.attention, x)
    # An open block of up to L-1 tokens may push the segment into one block more.
    blocks = (x.shape[1] + config.block - 2) // config.block + 1
    given = (params, state, q, k, v)

    def read(blocks):
        return lambda *given: _read(config, blocks, *given)

    if x.shape[1] % config.block:
        state, y = read(blocks)(*given)
    else:
        # In training: whole blocks, with none open before.
        whole = jnp.all(state.open_length == 0)
        exact = read(x.shape[1] // config.block)
        state, y = jax.lax.cond(whole, exact, read(blocks), *given)
    return state, projections.output_projection(params.attention, y, x)


def _read(config, blocks, params, state, q, k, v):
    """`apply` between the projections, in the given number of blocks."""
    t, size = q.shape[1], blocks * config.block
    lay_out = functools.partial(
        places.lay_out, config.queue + size, config.queue + state.open_length
    )
    keys, values = (
        lay_out(state.keys, token_rows(k)),
        lay_out(state.values, token_rows(v)),
    )
    # Open tokens were answered by the calls that read them.
    nothing = jnp.zeros_like(q[:, :0], jnp.float32)
    queries = places.lay_out(size, state.open_length, nothing, q)

    def by_blocks(x):
        return x.reshape(x.shape[0], blocks, config.block, *x.shape[2:])

    def queued(rows):
        """The N slots before each block."""
        starts = range(0, size, config.block)
        return jnp.stack([rows[:, i : i + config.queue] for i in starts], axis=1)

    queries = by_blocks(queries.astype(q.dtype))
    key, value = (
        token_heads(config, by_blocks(leaf[:, config.queue :]), q.dtype)
        for leaf in (keys, values)
    )
    local = _causal(config, queries, key, value)
    before = jnp.arange(blocks, dtype=jnp.int32)[None] * config.block
    before = advanced(state.length[:, None], before)
    key, value = (token_heads(config, queued(leaf), q.dtype) for leaf in (keys, values))
    read = _from_queue(config, queries, key, value, before)
    y = _gated(params, local, read, before)
    y = y.reshape(y.shape[0], size, *y.shape[3:])
    y = places.take(y, state.open_length, t)
    return _after(config, state, keys, values, t), y


def _after(config, state, keys, values, tokens):
    """The state after `tokens` more, laid out behind those of the state."""
    total = state.open_length + tokens
    ended = total // config.block * config.block
    slots = config.queue + config.block
    return MemorizingState(
        keys=places.take(keys, ended, slots),
        values=places.take(values, ended, slots),
        length=advanced(state.length, ended),
        open_length=total - ended,
    )


def _causal(config, query, key, value):
    """Attention of each block [B, n, L, H, K] to itself."""
    slots = jnp.arange(config.block, dtype=jnp.int32)
    query, key = (projections.apply_rope(config, x, slots) for x in (query, key))
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    return attend.causal(q, k, v).reshape(query.shape)


def _from_queue(
    config: MemorizingConfig,
    query: Float[Array, "B n Q H K"],
    key: Float[Array, "B n N G K"],
    value: Float[Array, "B n N G K"],
    before: Int[Array, "B n"],
) -> Float[Array, "B n Q H K"]:
    """Attention of each block to its queue, `before` tokens before it."""
    back = config.queue - jnp.arange(config.queue, dtype=jnp.int32)
    filled = back[None, None] <= before[..., None]
    if config.top_k is None:
        mask = jnp.broadcast_to(filled[:, :, None], (*query.shape[:3], config.queue))
        return attend.blocks(query, key, value, mask)

    # One block after the other: the scores of all heads are in memory.
    one = jax.checkpoint(functools.partial(_nearest, config.top_k))
    block_first = (jnp.moveaxis(x, 1, 0) for x in (query, key, value, filled))
    y = jax.lax.map(lambda block: one(*block), tuple(block_first))
    return jnp.moveaxis(y, 0, 1)


def _nearest(
    top_k: int,
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B N G K"],
    value: Float[Array, "B N G K"],
    filled: Bool[Array, "B N"],
) -> Float[Array, "B Q H K"]:
    """Attention to the `top_k` keys of the largest scores, for each head."""
    b, q, h, width = query.shape
    grouped = query.reshape(b, q, key.shape[2], -1, width)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bqgrk,bsgk->bgrqs", grouped, key) * width**-0.5
    # Finite: a queue without tokens gives equal weights instead of NaN.
    scores = jnp.where(filled[:, None, None, None], scores, -1e30)
    least = jax.lax.stop_gradient(jax.lax.top_k(scores, top_k)[0][..., -1:])
    weights = jax.nn.softmax(jnp.where(scores >= least, scores, -1e30), axis=-1)
    y = product("bgrqs,bsgk->bqgrk", weights.astype(value.dtype), value)
    return y.reshape(b, q, h, width).astype(query.dtype)


def _gated(params, local, read, before):
    """a + g (r - a) of blocks [B, n, Q, H, K]; a alone before the first token."""
    share = jax.nn.sigmoid(params.gate_bias.astype(jnp.float32))[None, None]
    share = jnp.where((before > 0)[..., None], share, 0.0)[:, :, None, :, None]
    return local + share.astype(local.dtype) * (read - local)
