"""Attention and a recurrent memory that read the same tokens side by side.

    y_t = a attention(x_t) + m memory(x_t)

Zuo et al. (2025), Falcon-H1, https://arxiv.org/abs/2507.22448, section 2, with the
multipliers a and m of its published models.

Shapes: B batch, T time, D model.
"""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from memjax.checks import check_positive, require_instance
from memjax.mechanisms.attention import AttentionConfig, AttentionState, resize
from memjax.mechanisms.base import Cache, Mechanism, Packed
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax.mechanisms.mamba2 import Mamba2Config


@dataclasses.dataclass(frozen=True)
class ParallelConfig(MechanismDefaults):
    """Sizes of the two.

    Attributes:
        attention: the attention layer.
        memory: the recurrent layer, of the same width.
        attention_multiplier: a.
        memory_multiplier: m.
    """

    name: ClassVar[str] = "parallel"

    attention_layer: AttentionConfig
    memory: Mamba2Config
    attention_multiplier: float = 1.0
    memory_multiplier: float = 1.0

    def __post_init__(self):
        require_instance("attention_layer", self.attention_layer, AttentionConfig)
        require_instance("memory", self.memory, RecurrentConfig)
        check_positive(
            attention_multiplier=self.attention_multiplier,
            memory_multiplier=self.memory_multiplier,
        )
        if self.memory.model_dim != self.attention_layer.model_dim:
            raise ValueError(
                f"memory.model_dim must be {self.attention_layer.model_dim}, as "
                f"attention's is, got {self.memory.model_dim}"
            )

    @property
    def model_dim(self) -> int:
        """Width of the layer's input and output."""
        return self.attention_layer.model_dim

    @property
    def attention(self) -> HeadsConfig:
        """The heads of its attention."""
        return self.attention_layer

    @property
    def num_heads(self) -> int:
        """Heads that devices can share: as many groups as both layers have."""
        return math.gcd(self.attention_layer.num_heads, self.memory.num_heads)

    @property
    def max_length(self) -> int:
        """Tokens that the cache holds."""
        return self.attention_layer.max_length

    def keys_per_query(self, length: int) -> float:
        """Keys per query of its attention."""
        return self.attention_layer.keys_per_query(length)

    def within(self, length: int) -> "ParallelConfig":
        """The same with a cache of `length` tokens."""
        shorter = self.attention_layer.within(length)
        return dataclasses.replace(self, attention_layer=shorter)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        parts = ParallelParts(self.attention_layer.build(), self.memory.build())
        whole, packed = None, None
        if all(part.whole is not None for part in parts):
            whole = functools.partial(_whole, self, parts)
        if all(part.packed is not None for part in parts):
            chunk = math.lcm(*(part.packed.chunk for part in parts))
            packed = Packed(functools.partial(_packed, self, parts), chunk)
        return Mechanism(
            init_params=functools.partial(init_params, parts),
            init_state=functools.partial(init_state, parts),
            step=functools.partial(step, self, parts),
            apply=functools.partial(apply, self, parts),
            whole=whole,
            cache=Cache(
                functools.partial(init_cache, parts), self.max_length, resize_cache
            ),
            packed=packed,
        )

    def param_axes(self) -> "ParallelParts":
        """Sharding axes of the parameters."""
        return ParallelParts(
            self.attention_layer.param_axes(), self.memory.param_axes()
        )


class ParallelParts(NamedTuple):
    """Of the attention and of the memory: mechanisms, or parameters."""

    attention: PyTree
    memory: PyTree

    @property
    def lora_parts(self) -> tuple[str, ...]:
        """Parameters whose matrices LoRA may change."""
        return self._fields


class ParallelState(NamedTuple):
    """The cache of attention, and the memory."""

    attention: AttentionState
    memory: PyTree

    @property
    def keys(self) -> Float[Array, "B S J"]:
        """Keys of the cache."""
        return self.attention.keys

    @property
    def length(self) -> Int[Array, " B"]:
        """Tokens read."""
        return self.attention.length


def init_params(parts: ParallelParts, key: PRNGKeyArray) -> ParallelParts:
    """Draws the parameters of both."""
    keys = jax.random.split(key)
    return ParallelParts(
        parts.attention.init_params(keys[0]), parts.memory.init_params(keys[1])
    )


def init_state(parts: ParallelParts, batch: int) -> ParallelState:
    """An empty cache and an empty memory."""
    return ParallelState(*(part.init_state(batch) for part in parts))


def init_cache(
    parts: ParallelParts, batch: int, slots: int | None, dtype: DTypeLike
) -> ParallelState:
    """An empty cache of `slots` tokens in `dtype`, and an empty memory."""
    cache = parts.attention.cache.init(batch, slots, dtype)
    return ParallelState(cache, parts.memory.init_state(batch))


def resize_cache(state: ParallelState, slots: int) -> ParallelState:
    """The same state with `slots` slots, no fewer than before."""
    return state._replace(attention=resize(state.attention, slots))


def step(
    config: ParallelConfig,
    parts: ParallelParts,
    params: ParallelParts,
    state: ParallelState,
    x: Float[Array, "B D"],
) -> tuple[ParallelState, Float[Array, "B D"]]:
    """Both read one token."""
    return _read(config, [part.step for part in parts], params, state, x)


def apply(
    config: ParallelConfig,
    parts: ParallelParts,
    params: ParallelParts,
    state: ParallelState,
    x: Float[Array, "B T D"],
) -> tuple[ParallelState, Float[Array, "B T D"]]:
    """Both read a segment."""
    return _read(config, [part.apply for part in parts], params, state, x)


def _read(config, functions, params, state, x):
    """The states after both functions, and the sum of their outputs."""
    read = zip(functions, params, state, strict=True)
    after, y = zip(*(function(p, s, x) for function, p, s in read), strict=True)
    return ParallelState(*after), _sum(config, *y)


def _whole(
    config: ParallelConfig,
    parts: ParallelParts,
    params: ParallelParts,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    both = zip(parts, params, strict=True)
    return _sum(config, *(part.whole(p, x, mask) for part, p in both))


def _packed(config, parts, params, x, starts):
    both = zip(parts, params, strict=True)
    return _sum(config, *(part.packed.whole(p, x, starts) for part, p in both))


def _sum(config, attended, read):
    """a attention(x) + m memory(x)."""
    return config.attention_multiplier * attended + config.memory_multiplier * read
