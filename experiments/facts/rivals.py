"""Rivals of a memory, trained as it is: a cache that learns what to keep, a GRU.

The cache keeps the N tokens with the highest scores w x so far, each with its key and
value in every head, and attends to them and to the token being read:

    y_t = Σ_i g_i exp(c q_tᵀ k_i - a log(1 + age_i)) v_i / Σ_i (the same without v_i)

g_i is 1 for a kept token and 0 for a dropped one. Its gradient is straight-through:
that of the sigmoid of the token's score minus the lowest kept score. Tokens dropped
within the open chunk have it too. Learned eviction as in the scores of H2O
(https://arxiv.org/abs/2306.14048), trained instead of summed.

The GRU (Cho et al. 2014, https://arxiv.org/abs/1406.1078) has blocks of H units, whose
gates begin with time constants up to `LONGEST` (Tallec & Ollivier 2018,
https://arxiv.org/abs/1804.11188). Its input projections are those of the layer.

Shapes: B batch, T time, H heads, K key, V value, N entries, S N entries and T tokens.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax.checks import check_sizes
from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax.mechanisms.layers.recurrent.style import RecurrentStyle

#: Tokens of a chunk, in which dropped tokens still have gradients.
CHUNK = 256
#: Units of a block of the GRU; the longest time constant before training, in tokens.
UNITS, LONGEST = 32, 1024.0
#: Of empty entries, and of no token.
EMPTY = -1e30


@dataclasses.dataclass(frozen=True)
class LearnedCacheConfig(RecurrentConfig):
    """A layer with a cache of `entries` tokens; see `RecurrentConfig`."""

    name: ClassVar[str] = "learned_cache"

    entries: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_sizes(entries=self.entries)

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(self, _cache_params, _cache_state, _cache_step, _cache_apply)

    def cell_axes(self) -> Any:
        """Sharding axes of its parameters."""
        return CacheParams(axes("model"), axes("heads"), axes("heads"))


class CacheParams(NamedTuple):
    """Scores, and of each head the scale c and the slope a, before softplus."""

    score: Float[Array, "D 1"]
    scale: Float[Array, " H"]
    slope: Float[Array, " H"]


class Cache(NamedTuple):
    """The N tokens of the highest scores; an empty entry has the score `EMPTY`."""

    keys: Float[Array, "B N H K"]
    values: Float[Array, "B N H V"]
    scores: Float[Array, "B N"]
    ages: Float[Array, "B N"]


def _cache_params(config, key) -> CacheParams:
    heads = jnp.ones(config.num_heads)
    score = gates.draw_weight(key, config.model_dim, 1)
    return CacheParams(score, 8.0 * heads, -4.0 * heads)


def _cache_state(config, batch: int) -> Cache:
    n, h = config.entries, config.num_heads
    return Cache(
        jnp.zeros((batch, n, h, config.key_dim)),
        jnp.zeros((batch, n, h, config.value_dim)),
        jnp.full((batch, n), EMPTY),
        jnp.zeros((batch, n)),
    )


def _cache_step(config, params, memory, q, k, v, x):
    memory, y = _cache_apply(
        config, params, memory, *(part[:, None] for part in (q, k, v, x))
    )
    return memory, y[:, 0]


def _cache_apply(config, params, memory, q, k, v, x):
    memory = _cache_state(config, q.shape[0]) if memory is None else memory
    length, found = q.shape[1], []
    for start in range(0, length, CHUNK):
        part = (z[:, start : start + CHUNK] for z in (q, k, v, x))
        memory, y = _cache_chunk(params, memory, *part)
        found.append(y)
    return memory, jnp.concatenate(found, axis=1)


@jax.checkpoint
def _cache_chunk(params, memory: Cache, q, k, v, x):
    """A chunk's reads, and the N best of the cache and the chunk."""
    n, t = memory.scores.shape[1], q.shape[1]
    score = gates.linear_logits(x, params.score)[..., 0].astype(jnp.float32)
    scores = jnp.concatenate([memory.scores, score], axis=1)
    keys = jnp.concatenate([memory.keys, k.astype(jnp.float32)], axis=1)
    values = jnp.concatenate([memory.values, v.astype(jnp.float32)], axis=1)
    now = jax.lax.broadcasted_iota(jnp.float32, score.shape, 1) + 1
    born = jnp.concatenate([-memory.ages, now], axis=1)
    lowest = _lowest_kept(jax.lax.stop_gradient(memory.scores), score)
    age = now[..., None] - born[:, None]
    is_before = (age > 0) & (scores[:, None] > EMPTY / 2)
    kept = is_before & (scores[:, None] >= lowest[..., None])
    soft = jax.nn.sigmoid(scores[:, None] - jnp.maximum(lowest, EMPTY)[..., None])
    soft = jnp.where(is_before, soft, 0.0)
    gate = soft + jax.lax.stop_gradient(kept - soft)
    # A token reads itself too, which has not to be kept for it.
    gate = jnp.where(age == 0, 1.0, gate)[:, None]
    logits = jnp.einsum("bthk,bshk->bhts", q.astype(jnp.float32), keys)
    logits *= jax.nn.softplus(params.scale)[None, :, None, None]
    since = jnp.log1p(jnp.maximum(age, 0))[:, None]
    logits -= jax.nn.softplus(params.slope)[None, :, None, None] * since
    # The maximum of the gated-in tokens alone: a larger one would underflow them all.
    top = jnp.where(gate > 0, logits, EMPTY).max(axis=-1, keepdims=True)
    weights = gate * jnp.exp(jnp.minimum(logits - jax.lax.stop_gradient(top), 20.0))
    weights /= weights.sum(axis=-1, keepdims=True)
    y = jnp.einsum("bhts,bshv->bthv", weights, values)
    best, at = jax.lax.top_k(scores, n)

    kept_keys = jnp.take_along_axis(keys, at[..., None, None], axis=1)
    kept_values = jnp.take_along_axis(values, at[..., None, None], axis=1)
    ages = t - jnp.take_along_axis(born, at, axis=1)
    return Cache(kept_keys, kept_values, best, ages), y.astype(v.dtype)


def _lowest_kept(kept: Float[Array, "B N"], scores: Float[Array, "B T"]) -> Array:
    """The lowest score in the cache before each token [B, T]."""

    def insert(kept, score):
        lowest = kept.min(axis=1)
        place = jax.nn.one_hot(kept.argmin(axis=1), kept.shape[1], dtype=bool)
        better = (score > lowest)[:, None] & place
        return jnp.where(better, score[:, None], kept), lowest

    tokens = jax.lax.stop_gradient(scores).T
    return jax.lax.scan(insert, kept, tokens)[1].T


@dataclasses.dataclass(frozen=True)
class GRUConfig(RecurrentConfig):
    """A layer of blocks of `value_dim` units; see `RecurrentConfig`."""

    name: ClassVar[str] = "gru"

    style: RecurrentStyle = RecurrentStyle(
        conv_width=0, query_silu=False, key_silu=False, unit_norm=False
    )

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(self, _gru_params, _gru_state, _gru_step, _gru_apply)

    def cell_axes(self) -> Any:
        """Sharding axes of its parameters."""
        return axes(None, "heads"), axes("heads")


def _gru_params(config, key) -> tuple[Array, Array]:
    """Matrices [3, H, V, V] of the state, for both gates and the candidate; a bias."""
    shape = (3, config.num_heads, config.value_dim, config.value_dim)
    one, two = jax.random.split(key)
    matrices = jax.random.normal(one, shape) / math.sqrt(config.value_dim)
    spread = jax.random.uniform(two, (config.num_heads, config.value_dim))
    return matrices, math.log(LONGEST) * spread


def _gru_state(config, batch: int) -> Float[Array, "B H V"]:
    return jnp.zeros((batch, config.num_heads, config.value_dim))


def _gru_step(config, params, memory, q, k, v, x):
    matrices, bias = params
    update, reset, new = jnp.einsum("bhv,ghvw->gbhw", memory, matrices)
    keep = jax.nn.sigmoid(q + update + bias[None])
    candidate = jnp.tanh(v + jax.nn.sigmoid(k + reset) * new)
    memory = keep * memory + (1 - keep) * candidate
    return memory.astype(jnp.float32), memory.astype(v.dtype)


def _gru_apply(config, params, memory, q, k, v, x):
    memory = _gru_state(config, q.shape[0]) if memory is None else memory
    step = functools.partial(_gru_step, config, params)
    tokens = tuple(jnp.moveaxis(z, 1, 0) for z in (q, k, v, x))
    memory, y = jax.lax.scan(lambda memory, z: step(memory, *z), memory, tokens)
    return memory, jnp.moveaxis(y, 0, 1)
