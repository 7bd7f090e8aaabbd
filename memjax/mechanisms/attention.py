"""Full causal attention over a key-value cache.

    y_t = Σ_{s<=t} softmax_s(q_tᵀ k_s / √K) v_s        (RoPE on q and k)

Llama 3's attention (RoPE, grouped queries): Grattafiori et al. (2024),
https://arxiv.org/abs/2407.21783, section 3.2.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
S slots of the cache.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from memjax.checks import check_sizes
from memjax.mechanisms.base import Cache, Mechanism, Packed, check_input
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents, projections
from memjax.mechanisms.layers.heads import HeadsConfig, mean_keys
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.layers.saturating_counter import LAST, advanced
from memjax.mechanisms.layers.softmax import cached
from memjax.mechanisms.layers.softmax import dot_product_attention as attend


@dataclasses.dataclass(frozen=True)
class AttentionConfig(HeadsConfig, MechanismDefaults):
    """Sizes of a full attention layer.

    Attributes:
        capacity: longest history in tokens.
        initial_slots: slots of an empty cache; None is the capacity. A language model
            adds slots as texts grow: `LanguageModel.reserve`.
        bounded: whether longer histories are refused. False is for models without
            positions, as published hybrids are (NoPE): `capacity` is then the length
            that they were trained on, and caches grow beyond it.
    """

    name: ClassVar[str] = "attention"

    capacity: int = 8192
    initial_slots: int | None = None
    bounded: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_sizes(capacity=self.capacity, initial_slots=self.slots)
        if self.slots > self.capacity:
            raise ValueError(
                f"initial_slots must be at most capacity={self.capacity}, "
                f"got {self.slots}"
            )
        if not self.bounded and self.rope_theta is not None:
            raise ValueError(
                "bounded must be True with RoPE, whose angles were trained up to the "
                f"capacity, got False with rope_theta={self.rope_theta}"
            )

    @property
    def slots(self) -> int:
        """Slots of an empty cache."""
        return self.capacity if self.initial_slots is None else self.initial_slots

    @property
    def plain_attention(self) -> HeadsConfig:
        """Itself."""
        return self

    @property
    def max_length(self) -> int:
        """Tokens that the cache can hold."""
        return self.capacity if self.bounded else LAST

    def keys_per_query(self, length: int) -> float:
        """All positions before it, and its own."""
        return mean_keys(length, min(self.max_length, length))

    def within(self, length: int) -> "AttentionConfig":
        """The same attention with a cache of `length` tokens."""
        return dataclasses.replace(
            self, capacity=length, initial_slots=None, bounded=True
        )

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""

        def whole_sequence(params, x, mask):
            # The same limit as with a cache, which the length need not have here.
            _check_fits(x.shape[1], self.max_length)
            return whole(self, params, x, mask)

        def packed_rows(params, x, starts):
            _check_fits(x.shape[1], self.max_length)
            return packed(self, params, x, starts)

        return Mechanism(
            init_params=functools.partial(projections.init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
            apply_masked=functools.partial(apply, self),
            whole=whole_sequence,
            cache=Cache(functools.partial(init_state, self), self.max_length, resize),
            packed=Packed(packed_rows),
        )

    def param_axes(self) -> AttentionParams:
        """Sharding axes of the projections."""
        return projections.AXES


class AttentionState(NamedTuple):
    """Keys (with RoPE) and values of every token so far, J = G K channels of each.

    A slot is one row of all heads, which a TPU stores without padding.
    """

    keys: Float[Array, "B S J"]
    values: Float[Array, "B S J"]
    visible: Bool[Array, "B S"]  # False at masked tokens and beyond the length
    length: Int[Array, " B"]  # tokens read; saturates at 2**30


def init_state(
    config: AttentionConfig,
    batch: int,
    slots: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> AttentionState:
    """Returns an empty cache of at most `max_length` slots; None is `config.slots`."""
    slots = config.slots if slots is None else min(slots, config.max_length)
    shape = (batch, slots, config.num_kv_heads * config.head_dim)
    return AttentionState(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        visible=jnp.zeros((batch, slots), bool),
        length=jnp.zeros(batch, jnp.int32),
    )


def resize(state: AttentionState, slots: int) -> AttentionState:
    """The same cache with `slots` slots, no fewer than before."""
    more = slots - state.keys.shape[1]

    def pad(x):
        return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))

    return AttentionState(*map(pad, state[:-1]), length=state.length)


def step(
    config: AttentionConfig,
    params: AttentionParams,
    state: AttentionState,
    x: Float[Array, "B D"],
) -> tuple[AttentionState, Float[Array, "B D"]]:
    """Caches one token and attends to all."""
    state, y = apply(config, params, state, x[:, None])
    return state, y[:, 0]


def apply(
    config: AttentionConfig,
    params: AttentionParams,
    state: AttentionState,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[AttentionState, Float[Array, "B T D"]]:
    """Caches a segment and attends causally; see `ApplyMasked` for mask and lengths.

    From the first token beyond the slots of the state, the outputs are NaN.

    Raises:
        ValueError: if the segment alone has more tokens than the state has slots.
    """
    check_input(x, config.model_dim, state)
    b, t, _ = x.shape
    room = state.keys.shape[1]
    _check_fits(t, room)
    q, k, v = projections.qkv_projection(config, params, x)
    times = jnp.arange(t, dtype=jnp.int32)[None]
    positions = state.length[:, None] + times
    q = projections.apply_rope(config, q, positions)
    k = projections.apply_rope(config, k, positions)
    # Keys are cached with RoPE: a token's position never changes, unlike in a sliding
    # window.
    slots, length = positions, advanced(state.length, t)
    if lengths is not None:
        # A slot beyond the cache is dropped.
        slots = jnp.where(times < lengths[:, None], positions, room)
        length = advanced(state.length, lengths)
    visible = jnp.ones((b, t), bool) if mask is None else mask
    write = jax.vmap(lambda cache, new, at: cache.at[at].set(new, mode="drop"))

    def joined(x):
        return x.reshape(b, t, -1).astype(state.keys.dtype)

    state = AttentionState(
        keys=write(state.keys, joined(k), slots),
        values=write(state.values, joined(v), slots),
        visible=write(state.visible, visible, slots),
        length=length,
    )
    # The cache has a dtype of its own; products run in that of the activations.
    cache = (state.keys.astype(x.dtype), state.values.astype(x.dtype))

    def from_cache():
        return cached.from_rows(q, *cache, positions[:, 0], state.visible)

    if t == room and mask is None:
        # An empty cache has no past to read; on another, some tokens still fit.
        empty = jnp.all(positions[:, 0] == 0)
        y = jax.lax.cond(empty, lambda: attend.causal(q, k, v), from_cache)
    else:
        y = from_cache()
    # NaN instead of an exception: inside jit the length of the history is unknown.
    fits = (positions < room)[..., None]
    y = projections.output_projection(params, y, x)
    return state, jnp.where(fits, y, jnp.nan)


def whole(
    config: HeadsConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Causal attention inside one sequence, without a cache.

    Tokens at which `mask` is False keep their position and are never attended to;
    outputs there, and before the first visible token, are undefined.
    """
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    q, k, v = projections.rotated_qkv_projection(config, params, x, positions)
    return projections.output_projection(params, attend.causal(q, k, v, mask), x)


def packed(
    config: HeadsConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    starts: Bool[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Causal attention inside each document of a row; see `PackedWhole`."""
    documents.check_starts(starts, x)
    # Positions from the document's own start give it the angles that it has alone.
    positions = documents.positions(starts)
    q, k, v = projections.rotated_qkv_projection(config, params, x, positions)
    y = attend.causal(q, k, v, first=documents.first_tokens(starts))
    return projections.output_projection(params, y, x)


def _check_fits(tokens, capacity):
    if tokens > capacity:
        raise ValueError(f"x has {tokens} tokens, capacity is {capacity}")
