"""Attention to the last W tokens and to the first few.

    y_t = Σ_s softmax_s(q_tᵀ k_s / √K) v_s        over t-W < s <= t and s < S

Beltagy et al. (2020), https://arxiv.org/abs/2004.05150, section 3.1, causal. The S
first tokens are sinks: Xiao et al. (2023), https://arxiv.org/abs/2309.17453, section
3.2. A pretrained model attends to them whatever they are, and fails without them.

The window is a ring: slot p mod W holds the token at position p, in place of the one
that leaves. RoPE depends on distances alone, so a key is rotated by its slot and stays
as it is: exact at any length of the stream. A query at slot j is rotated by j for the
slots up to its own, and by j + W for those behind it, which are of the round before. As
in the second paper a sink is directly before the window, at a distance of at most
W + S - 1.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
J = G K, W window, S sinks, Q queries a block.
"""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from memjax.checks import check_sizes
from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.attention import packed as packed_attention
from memjax.mechanisms.attention import whole as whole_attention
from memjax.mechanisms.base import Cache, Mechanism, Packed, check_input
from memjax.mechanisms.config import MechanismConfig, MechanismDefaults
from memjax.mechanisms.layers import documents, projections
from memjax.mechanisms.layers.heads import HeadsConfig, mean_keys
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax.mechanisms.layers.softmax import cached, on_tpu, window_blocks
from memjax.mechanisms.layers.softmax import dot_product_attention as attend


@dataclasses.dataclass(frozen=True)
class SlidingWindowConfig(HeadsConfig, MechanismDefaults):
    """Sizes of a sliding-window layer.

    Attributes:
        window: tokens that a query sees, its own included.
        sinks: first tokens of the sequence that it sees too; 4 in the paper.
    """

    name: ClassVar[str] = "sliding_window"

    window: int = 2048
    sinks: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_sizes(window=self.window)
        check_sizes(least=0, sinks=self.sinks)
        if self.sinks > self.window:
            raise ValueError(
                f"sinks must be in [0, window={self.window}], got {self.sinks}"
            )

    @property
    def plain_attention(self) -> HeadsConfig:
        """Itself."""
        return self

    @property
    def tokens_per_call(self) -> int:
        """The window."""
        return self.window

    def keys_per_query(self, length: int) -> float:
        """The window, and the sinks of a text that is longer."""
        sinks = self.sinks if length > self.window else 0
        return mean_keys(length, self.window) + sinks

    def within(self, length: int) -> MechanismConfig:
        """Full attention where the window and the sinks see `length` tokens."""
        if self.window + self.sinks < length:
            return self
        return AttentionConfig(**vars(self.heads), capacity=length)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return Mechanism(
            init_params=functools.partial(projections.init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
            apply_masked=functools.partial(apply, self),
            whole=functools.partial(whole, self),
            cache=Cache(lambda batch, slots, dtype: init_state(self, batch, dtype)),
            # Each document of a row would need slots for sinks of its own.
            packed=None if self.sinks else Packed(functools.partial(packed, self)),
        )

    def param_axes(self) -> AttentionParams:
        """Sharding axes of the projections."""
        return projections.AXES


class Sinks(NamedTuple):
    """The first S keys (without RoPE) and values, and the tokens read so far."""

    keys: Float[Array, "B S G K"]
    values: Float[Array, "B S G K"]
    visible: Bool[Array, "B S"]  # False at masked tokens and those not read yet
    length: Int[Array, " B"]  # saturates at 2**30


class SlidingWindowState(NamedTuple):
    """The last W keys, with RoPE of their slots, and values; None without sinks.

    A slot is one row of all heads, which a TPU stores without padding.
    """

    keys: Float[Array, "B W J"]
    values: Float[Array, "B W J"]
    visible: Bool[Array, "B W"]  # False at masked tokens and before the first
    slot: Int[Array, " B"]  # of the next token, and of the oldest
    sinks: Sinks | None = None


def init_state(
    config: SlidingWindowConfig, batch: int, dtype: DTypeLike = jnp.float32
) -> SlidingWindowState:
    """Returns an empty window."""

    def empty(slots, *channels):
        keys, values = (jnp.zeros((batch, slots, *channels), dtype) for _ in range(2))
        return (
            keys,
            values,
            jnp.zeros((batch, slots), bool),
            jnp.zeros(batch, jnp.int32),
        )

    heads = config.num_kv_heads, config.head_dim
    sinks = Sinks(*empty(config.sinks, *heads)) if config.sinks else None
    return SlidingWindowState(*empty(config.window, math.prod(heads)), sinks)


def step(
    config: SlidingWindowConfig,
    params: AttentionParams,
    state: SlidingWindowState,
    x: Float[Array, "B D"],
) -> tuple[SlidingWindowState, Float[Array, "B D"]]:
    """Slides the window by one token and attends inside it."""
    state, y = apply(config, params, state, x[:, None])
    return state, y[:, 0]


def apply(
    config: SlidingWindowConfig,
    params: AttentionParams,
    state: SlidingWindowState,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[SlidingWindowState, Float[Array, "B T D"]]:
    """Attends to the window and the sinks; see `ApplyMasked` for mask and lengths."""
    check_input(x, config.model_dim, state)
    q, k, v = projections.qkv_projection(config, params, x)
    state, y = read(config, state, q, k, v, mask, lengths)
    return state, projections.output_projection(params, y, x)


def read(
    config: SlidingWindowConfig,
    state: SlidingWindowState,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    mask: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[SlidingWindowState, Float[Array, "B T H K"]]:
    """`apply` between the projections, of queries and keys without RoPE."""
    tokens = q.shape[1]
    new = (k, v, jnp.ones(k.shape[:2], bool) if mask is None else mask)
    after = _slide(config, state, *new, lengths)
    if tokens == 1:
        y, mass = _to_ring(config, after, q)
    else:
        past = in_order(config, state)
        y, mass = window_blocks.in_blocks(config, config.window, past, q, *new)
    if state.sinks is None:
        return after, y
    new = tuple(leaf.astype(state.keys.dtype) for leaf in new[:2]) + new[2:]
    times = jnp.arange(tokens, dtype=jnp.int32)[None]
    positions = state.sinks.length[:, None] + times
    sinks = _keep_first(config, state.sinks, new, positions, lengths)
    # Queries see a sink here only when it has left their window.
    y = attend.join((y, mass), _to_sinks(config, sinks, q, positions))
    return after._replace(sinks=sinks), y


def _slide(config, state, k, v, visible, lengths):
    """The ring with the last W of the new tokens."""
    window, tokens = config.window, k.shape[1]
    # Where all have one length, the others need not be rotated.
    first = max(tokens - window, 0) if lengths is None else 0
    times = jnp.arange(first, tokens, dtype=jnp.int32)[None]
    end = jnp.int32(tokens) if lengths is None else lengths[:, None]
    slots = (state.slot[:, None] + times) % window
    # Padding is not kept; a slot beyond the last is dropped.
    kept = (times < end) & (times >= end - window)
    at = jnp.where(kept, slots, window)
    k, v, visible = (leaf[:, first:] for leaf in (k, v, visible))
    k = projections.apply_rope(config, k.astype(state.keys.dtype), slots)

    def joined(x):
        return x.reshape(*x.shape[:2], -1).astype(state.keys.dtype)

    write = jax.vmap(lambda ring, new, at: ring.at[at].set(new, mode="drop"))
    return state._replace(
        keys=write(state.keys, joined(k), at),
        values=write(state.values, joined(v), at),
        visible=write(state.visible, visible, at),
        slot=(state.slot + (tokens if lengths is None else lengths)) % window,
    )


def in_order(
    config: SlidingWindowConfig, state: SlidingWindowState
) -> tuple[Float[Array, "B W G K"], Float[Array, "B W G K"], Bool[Array, "B W"]]:
    """Keys without RoPE, values, and which are visible, the oldest first."""
    window = config.window

    def turn(ring, first):
        return jax.lax.dynamic_slice_in_dim(
            jnp.concatenate([ring, ring]), first, window
        )

    keys, values, visible = (jax.vmap(turn)(leaf, state.slot) for leaf in state[:3])
    slots = state.slot[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
    return *_unrotated(config, keys, values, slots % window), visible


def oldest(
    config: SlidingWindowConfig, state: SlidingWindowState
) -> tuple[Float[Array, "B 1 G K"], Float[Array, "B 1 G K"], Bool[Array, "B 1"]]:
    """The first of `in_order`, which the next token replaces."""

    def at(ring, slot):
        return jax.lax.dynamic_slice_in_dim(ring, slot, 1)

    keys, values, visible = (jax.vmap(at)(leaf, state.slot) for leaf in state[:3])
    return *_unrotated(config, keys, values, state.slot[:, None]), visible


def _unrotated(config, keys, values, slots):
    """Keys without the RoPE of their slots, and values, by heads."""
    heads = (*slots.shape, config.num_kv_heads, config.head_dim)
    keys = projections.remove_rope(config, keys.reshape(heads), slots)
    return keys, values.reshape(heads)


def _to_ring(config, state, q):
    """Attention of the newest token's q [B, 1, H, K] to the ring, and its mass."""
    window = config.window
    own = ((state.slot - 1) % window)[:, None]
    # Once with the slots up to its own, and once with those of the round before.
    turns = jnp.concatenate([own, own + window], axis=1)
    queries = projections.apply_rope(config, jnp.repeat(q, 2, axis=1), turns)
    before = jnp.arange(window, dtype=jnp.int32)[None] > own
    seen = state.visible[:, None] & jnp.stack([~before, before], axis=1)
    y, mass = cached.rows_with_mass(queries, state.keys, state.values, seen)
    first, second = ((y[:, i : i + 1], mass[:, i : i + 1]) for i in range(2))
    return attend.join(first, second), jnp.logaddexp(first[1], second[1])


def _keep_first(config, sinks, new, positions, lengths):
    """The sinks with the new tokens among the first S."""
    keys, values, visible = new
    count, tokens = config.sinks, positions.shape[1]
    if lengths is not None:
        # Padding is no token; a place beyond the last sink is dropped.
        times = jnp.arange(tokens, dtype=jnp.int32)[None]
        positions = jnp.where(times < lengths[:, None], positions, count)
    write = jax.vmap(lambda kept, new, at: kept.at[at].set(new, mode="drop"))
    return Sinks(
        keys=write(sinks.keys, keys, positions),
        values=write(sinks.values, values, positions),
        visible=write(sinks.visible, visible, positions),
        length=advanced(sinks.length, tokens if lengths is None else lengths),
    )


def _to_sinks(config, sinks, q, positions):
    """Attention of the queries [B, T, H, K] to the sinks that left their window."""
    window, count = config.window, config.sinks
    places = jnp.arange(count, dtype=jnp.int32)
    # From this position on, sinks stay directly before the window.
    last = jnp.minimum(positions, window + count - 1)
    left = places[None, None] <= positions[..., None] - window
    return attend.masked_with_mass(
        projections.apply_rope(config, q, last),
        projections.apply_rope(config, sinks.keys.astype(q.dtype), places),
        sinks.values.astype(q.dtype),
        left & sinks.visible[:, None],
    )


def whole(
    config: SlidingWindowConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Outputs of a full sequence; full attention where the window sees all of it."""
    # No window and no state to build: full attention sees the same keys.
    if x.shape[1] <= config.window + config.sinks:
        return whole_attention(config, params, x, mask)

    def in_blocks(params, x):
        return apply(config, params, init_state(config, x.shape[0]), x, mask)[1]

    def in_one_kernel(params, x):
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        q, k, v = projections.rotated_qkv_projection(config, params, x, positions)
        y = on_tpu.attention(q, k, v, config.window)
        return projections.output_projection(params, y, x)

    if config.sinks or mask is not None or _no_kernel(config, x):
        return in_blocks(params, x)
    return jax.lax.platform_dependent(params, x, tpu=in_one_kernel, default=in_blocks)


def packed(
    config: SlidingWindowConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    starts: Bool[Array, "B T"],
) -> Float[Array, "B T D"]:
    """The window inside each document of a row, without sinks; see `PackedWhole`."""
    if x.shape[1] <= config.window:
        return packed_attention(config, params, x, starts)
    documents.check_starts(starts, x)

    def in_blocks(params, x, starts):
        q, k, v = projections.qkv_projection(config, params, x)
        visible = jnp.ones(starts.shape, bool)
        nothing = in_order(config, init_state(config, x.shape[0], x.dtype))
        first = documents.first_tokens(starts)
        given = (nothing, q, k, v, visible, first)
        y, _ = window_blocks.in_blocks(config, config.window, *given)
        return projections.output_projection(params, y, x)

    def in_one_kernel(params, x, starts):
        positions = documents.positions(starts)
        q, k, v = projections.rotated_qkv_projection(config, params, x, positions)
        first = documents.first_tokens(starts)
        y = on_tpu.attention(q, k, v, config.window, first)
        return projections.output_projection(params, y, x)

    if _no_kernel(config, x):
        return in_blocks(params, x, starts)
    return jax.lax.platform_dependent(
        params, x, starts, tpu=in_one_kernel, default=in_blocks
    )


def _no_kernel(config, x):
    """The reason why no TPU kernel takes the queries of x; "" if one does."""
    heads = (*x.shape[:2], config.num_heads, config.head_dim)
    query = jax.ShapeDtypeStruct(heads, x.dtype)
    return on_tpu.unsupported(query, query)


def widened(config: MechanismConfig, more: int) -> SlidingWindowConfig | None:
    """A window longer by `more` tokens; None for other mechanisms."""
    if not isinstance(config, SlidingWindowConfig):
        return None
    return dataclasses.replace(config, window=config.window + more)
