"""SnapKV: a key-value cache of bounded size, chosen by the attention of a text's end.

    v_s = Σ_q softmax_s(q·k / √K)    q: the last W tokens' queries, of a group's heads
    kept: the n - W tokens before them with the largest max_{|i| <= κ/2} v_{s+i}, and
    the last W

Li et al. (2024), SnapKV, https://arxiv.org/abs/2404.14469, section 4 and Listing 1; a
window of 32 and max-pooling over κ = 7 are those of its experiments on LongBench. The
paper lets every query head keep tokens of its own; here the heads of a group vote
together, so that grouped queries keep their small cache.

A text that is read in one piece is compressed as published: the question at its end
votes. Read piece by piece, the cache is compressed behind every piece, and old tokens
compete with new ones: memory is bounded at any length (M+,
https://arxiv.org/abs/2502.00592, section 4.3). Then the votes are of text that knows no
question. It attends to near tokens, and each compression drops a share of the old ones:
the part of a text that remains falls geometrically with its distance.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
S capacity, W window, n kept.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.checks import check_sizes, require_instance
from memjax.mechanisms import Mechanism
from memjax.mechanisms.attention import AttentionState
from memjax.mechanisms.base import replace_rows
from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.models.language_model.config import kinds
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import replace_config, replace_mechanisms


@dataclasses.dataclass(frozen=True)
class SnapKVConfig:
    """Sizes of the cache, in tokens.

    Attributes:
        keep: n, what a key-value head keeps behind a piece, the window's own included.
        room: what fits besides: the longest piece, or the last one and what is decoded.
        window: W, the last tokens of a piece, which vote and are kept.
        kernel: κ, neighbours that a vote counts for; odd.
    """

    keep: int = 1024
    room: int = 1024
    window: int = 32
    kernel: int = 7

    def __post_init__(self):
        check_sizes(room=self.room, window=self.window, kernel=self.kernel)
        if self.keep <= self.window:
            raise ValueError(
                f"keep must be above window={self.window}, got {self.keep}"
            )
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")


def add_snapkv(model: LanguageModel, config: SnapKVConfig) -> LanguageModel:
    """The same parameters; every piece that is read is compressed behind it.

    `keep` tokens or fewer are full attention. Single tokens, as in decoding, are cached
    and never compressed. What is kept depends on where pieces end, so reading in other
    pieces gives other results; outputs of a piece see all that was kept before it.
    Tokens beyond `keep + room` give NaN, as beyond any capacity of full attention.

    Args:
        model: with full attention in every layer.
        config: sizes of the cache.

    Raises:
        ValueError: if a layer is another mechanism.
    """
    require_instance("model", model, LanguageModel)
    require_instance("config", config, SnapKVConfig)
    if not all(m.plain_attention and m.max_length for m in model.config.mechanisms):
        raise ValueError(
            f"model must have attention in every layer, got {kinds(model.config)}"
        )
    capacity = config.keep + config.room
    mechanisms = tuple(m.within(capacity) for m in model.config.mechanisms)
    rebuilt = replace_config(model, mechanisms=mechanisms)
    layers = zip(rebuilt.blocks, rebuilt.config.layers, strict=True)
    built = [_compressing(block.functions, heads, config) for block, heads in layers]
    return replace_mechanisms(rebuilt, rebuilt.config, built)


def choose(
    queries: Float[Array, "B W H K"], state: AttentionState, keep: int, kernel: int
) -> Int[Array, "B n G"]:
    """Slots of the tokens that each key-value head keeps, in the order of the text.

    Args:
        queries: of the last W tokens that the state has, with RoPE.
        state: of more than `keep` tokens; a row with fewer gets slots without meaning.
        keep: n, above W.
        kernel: κ, odd.
    """
    b, window, h, width = queries.shape
    s, g = state.keys.shape[1], state.keys.shape[2] // width
    slots = jnp.arange(s, dtype=jnp.int32)[None]
    last = state.length[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
    seen = (slots[:, None] <= last[..., None]) & state.visible[:, None]
    grouped = queries.astype(jnp.float32).reshape(b, window, g, h // g, width)
    keys = state.keys.reshape(b, s, g, width)
    scores = jnp.einsum("bwgrk,bsgk->bgrws", grouped, keys) * width**-0.5
    # Finite: batch elements shorter than the window have queries that see nothing.
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    # The window's own tokens are kept in any case, and do not compete.
    before = (slots < last[:, :1]) & state.visible
    votes = jax.nn.softmax(scores, axis=-1).sum(axis=(2, 3)) * before[:, None]
    pooled = jax.lax.reduce_window(
        votes, -jnp.inf, jax.lax.max, (1, 1, kernel), (1, 1, 1), "SAME"
    )
    # Votes are never negative: no slot of another kind comes before one that counts.
    best = jax.lax.top_k(jnp.where(before[:, None], pooled, -1.0), keep - window)[1]
    # In the order of the text, as a cache that was never compressed has.
    best = jnp.sort(best, axis=-1).astype(jnp.int32).transpose(0, 2, 1)
    recent = jnp.broadcast_to(last[..., None], (b, window, g))
    return jnp.concatenate([best, recent], axis=1)


def compact(
    heads: HeadsConfig, state: AttentionState, slots: Int[Array, "B n G"]
) -> AttentionState:
    """The cache of the chosen tokens alone, at its beginning, to go on from.

    The next token takes the position n. Every key is turned by n - length, so that its
    distance to what comes is what it was.
    """
    n, capacity = slots.shape[1], state.keys.shape[1]

    def apart(x):
        return x.reshape(*x.shape[:2], *slots.shape[2:], -1)

    keys, values = (
        jnp.take_along_axis(apart(x), slots[..., None], axis=1)
        for x in (state.keys, state.values)
    )
    # RoPE depends on distances: a further rotation moves a key to another position.
    shift = jnp.broadcast_to(n - state.length[:, None], slots.shape[:2])
    # YaRN's factor is in the keys already.
    keys = projections.remove_amplitude(
        heads, projections.apply_rope(heads, keys, shift)
    )
    fill = ((0, 0), (0, capacity - n), (0, 0))

    def joined(x):
        return jnp.pad(x.reshape(*x.shape[:2], -1), fill)

    return AttentionState(
        keys=joined(keys),
        values=joined(values),
        visible=jnp.broadcast_to(jnp.arange(capacity)[None] < n, state.visible.shape),
        length=jnp.full_like(state.length, n),
    )


def vote(
    heads: HeadsConfig,
    params: AttentionParams,
    config: SnapKVConfig,
    state: AttentionState,
    x: Float[Array, "B T D"],
) -> Int[Array, "B n G"]:
    """Slots that the last tokens of a piece choose."""
    window = min(config.window, x.shape[1])
    queries = projections.query_projection(heads, params, x[:, -window:])
    places = state.length[:, None] - window
    places = places + jnp.arange(window, dtype=jnp.int32)[None]
    queries = projections.apply_rope(heads, queries, places)
    return choose(queries, state, config.keep, config.kernel)


def _compressing(attention: Mechanism, heads: Any, config: SnapKVConfig) -> Mechanism:
    """Attention with an `apply` that compresses the cache after reading."""

    def apply(params: AttentionParams, state: AttentionState, x: Float[Array, "B T D"]):
        state, y = attention.apply(params, state, x)
        slots = vote(heads, params, config, state, x)
        # A shorter cache is kept whole: there is nothing to choose.
        longer = state.length > config.keep
        return replace_rows(state, compact(heads, state, slots), longer), y

    # Heads keep different tokens, so one mask of what is visible would not do.
    return attention._replace(apply=apply, apply_masked=None, cache=None, can_pad=False)
