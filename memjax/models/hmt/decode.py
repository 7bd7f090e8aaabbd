"""One token at a time: how HMT generates.

The open segment goes on from the backbone's state; see `hmt.py` for what prompt it has.

Shapes: B batch, L segment, E width.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged as segments
from memjax.models.hmt.state import HMTState

if TYPE_CHECKING:
    from memjax.models.hmt.model import HMT


def reread(
    model: "HMT",
    state: HMTState,
    prompt: Float[Array, "B E"],
    most: int,
    rows: Bool[Array, " B"],
) -> HMTState:
    """Gives `rows` the backbone's state after P, sensory and their open tokens.

    `most` bounds the tokens that such a row has.
    """

    def read(state):
        words = model.backbone.embed(state.tokens[:, : max(most, 1)])
        x, start = model.augment(state.memories, prompt, words)
        x, lengths = x[:, :-1], start + jnp.minimum(state.filled, most)
        mask = None
        if state.visible is not None:
            visible = state.visible[:, : words.shape[1]]
            mask = segments.mask(visible, start, state.filled, x.shape[1])
        empty = model.backbone.init_state(state.filled.shape[0])
        after = model.backbone.read_ragged(empty, x, lengths, mask)
        return mechanisms.reset(state.backbone, after, rows)

    backbone = jax.lax.cond(jnp.any(rows), read, lambda s: s.backbone, state)
    return state._replace(backbone=backbone)


def read_token(
    model: "HMT",
    state: HMTState,
    tokens: Int[Array, "B 1"],
    mask: Bool[Array, "B 1"] | None,
) -> tuple[HMTState, Float[Array, "B 1 E"]]:
    """One token: the open segment goes on from the backbone's state."""
    c = model.config
    here = jnp.arange(c.segment, dtype=jnp.int32)[None] == state.filled[:, None]
    visible = state.visible
    if visible is not None:
        new = jnp.ones(tokens.shape, bool) if mask is None else mask
        mask, visible = new, jnp.where(here, new, visible)
    state = state._replace(
        tokens=jnp.where(here, tokens, state.tokens), visible=visible
    )
    state = _begin(model, state)
    words = model.backbone.embed(tokens)
    backbone, features = model.backbone.read(state.backbone, words, mask)
    state = state._replace(backbone=backbone, filled=state.filled + 1)
    full = state.filled == c.segment
    state = jax.lax.cond(
        jnp.any(full), functools.partial(_complete, model, full), lambda s: s, state
    )
    return state, features


def _begin(model, state):
    """Opens segments, and finds the prompt of those whose j-th token has come."""
    c, begins = model.config, state.filled == 0
    if not c.reads_ahead:
        prompt, _ = model.search(state.memories, state.memories.summary)
        return reread(model, state, prompt, 0, begins)
    found = (state.filled == c.summary - 1) & ~state.searched
    found &= state.memories.held > 0

    def own(state):
        return model.summarise(state.tokens, state.visible, state.filled + 1)

    last = state.memories.summary
    summary = jax.lax.cond(jnp.any(found), own, lambda state: last, state)
    summary = jnp.where(found[:, None], summary, last)
    prompt, _ = model.search(state.memories, summary)
    state = reread(model, state, prompt, c.summary - 1, begins | found)
    return state._replace(searched=state.searched | found)


def _complete(model, full, state):
    """Runs the rows' complete segments as any other, for their memories."""
    known = jnp.where(full, model.config.segment, 0)
    cut = (state.tokens, state.visible, known)
    memories, _ = model.run_alone(False, state.memories, cut)
    masked = state.visible is not None
    empty = model.init_state(full.shape[0], masked=masked)
    opened = mechanisms.reset(state, empty, full)
    return opened._replace(memories=memories)
