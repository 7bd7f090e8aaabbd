"""The open segment of HMT, which generated text extends one token at a time.

The backbone's state after prompt, sensory memory and the open tokens is part of HMT's,
and a single token continues from there, or several where no summary reads ahead. When
the j-th token arrives, the segment's own summary finds its prompt, and the backbone
reads the segment again up to there. A complete segment is read once more, for its
memory.

Shapes: B batch, n segments, L segment, E width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.retrieval import Segment, search, summarize
from memjax.models.hmt.segment import augment, summarize_and_read
from memjax.models.hmt.state import HMTState, Memories, init_state
from memjax.models.hmt.weights import Weights


def read_tokens(
    config: HMTConfig,
    weights: Weights,
    state: HMTState,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None,
) -> tuple[HMTState, Float[Array, "B T E"]]:
    """Appends tokens to the open segments, which must have room.

    Where a summary reads ahead T must be 1, as the prompt may change at each token.
    """
    # Batch elements are at different positions in their segments.
    new = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = state.length[:, None] + new
    visible = state.visible
    if visible is not None:
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        visible = ragged.write(visible, at, mask)
    state = state._replace(
        tokens=ragged.write(state.tokens, at, tokens.astype(jnp.int32)), visible=visible
    )
    # Before the tokens are read: their own features depend on the prompt.
    state = _find_prompt(config, weights, state)
    x = weights.backbone.embed(tokens)
    backbone, features = weights.backbone.read(state.backbone, x, mask)
    length = state.length + tokens.shape[1]
    state = state._replace(backbone=backbone, length=length)
    state = jax.lax.cond(
        jnp.any(state.length == config.segment_length),
        lambda state: _complete(config, weights, state),
        lambda state: state,
        state,
    )
    return state, features


def open_last_segment(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    segments: Segment,
    prompts: Float[Array, "n B E"],
) -> HMTState:
    """The state after n segments have been read, of which the last may be open."""
    n, batch = segments.length.shape
    total = segments.length.sum(axis=0, dtype=jnp.int32)
    last, length = total // config.segment_length, total % config.segment_length
    is_open = length > 0
    # Where all n are complete, any segment will do: its length is 0.
    index = jnp.minimum(last, n - 1)[:, None]

    def pick(x):
        return ragged.take(jnp.moveaxis(x, 0, 1), index)[:, 0]

    # The state promises zeros beyond the open segment's length.
    known = jnp.arange(config.segment_length, dtype=jnp.int32)[None] < length[:, None]
    visible = segments.visible
    state = HMTState(
        memories=memories,
        tokens=jnp.where(known, pick(segments.tokens), 0),
        visible=None if visible is None else known & pick(visible),
        length=length,
        # A call of several tokens found the prompt with all of the segment's tokens,
        # which later single tokens keep.
        searched=is_open & config.reads_ahead,
        backbone=weights.backbone.init_state(batch),
    )
    return restart_backbone(
        config, weights, state, pick(prompts), config.segment_length - 1, is_open
    )


def restart_backbone(
    config: HMTConfig,
    weights: Weights,
    state: HMTState,
    prompt: Float[Array, "B E"],
    max_length: int,
    where: Bool[Array, " B"],
) -> HMTState:
    """Recomputes the backbone's state after P, sensory memory and tokens, `where` True.

    These are the open segment's first `max_length` tokens, or fewer if it is shorter.
    """

    def read(state):
        tokens = state.tokens[:, : max(max_length, 1)]
        x, start = augment(config, weights, state.memories, prompt, tokens)
        # The last position is the second prompt's, which ends a complete segment only.
        x, lengths = x[:, :-1], start + jnp.minimum(state.length, max_length)
        mask = None
        if state.visible is not None:
            visible = state.visible[:, : tokens.shape[1]]
            mask = ragged.mask(visible, start, state.length, x.shape[1])
        empty = weights.backbone.init_state(state.length.shape[0])
        after, _ = weights.backbone.read(empty, x, mask, lengths)
        return mechanisms.replace_rows(state.backbone, after, where)

    backbone = jax.lax.cond(jnp.any(where), read, lambda s: s.backbone, state)
    return state._replace(backbone=backbone)


def _find_prompt(config, weights, state):
    """Opens segments, and searches with the summary of those that have j tokens."""
    memories, opens = state.memories, state.length == 0
    if not config.reads_ahead:
        prompt, _ = search(config, weights, memories, memories.summary)
        return restart_backbone(config, weights, state, prompt, 0, opens)
    ready = (state.length == config.summary - 1) & ~state.searched
    # Without memories there is nothing to search: the prompt is M_init for any summary.
    ready &= memories.num_valid > 0

    def own_summary(state):
        segment = Segment(state.tokens, state.visible, state.length + 1)
        prompt = weights.retrieval.summary_prompt
        return summarize(config, weights.backbone, prompt, segment)

    # Before j tokens the previous segment's summary is used.
    previous = memories.summary
    summary = jax.lax.cond(jnp.any(ready), own_summary, lambda _: previous, state)
    prompt, _ = search(
        config, weights, memories, jnp.where(ready[:, None], summary, previous)
    )
    state = restart_backbone(
        config, weights, state, prompt, config.summary - 1, opens | ready
    )
    return state._replace(searched=state.searched | ready)


def _complete(config, weights, state):
    """Turns complete segments into memories and opens the next ones."""
    complete, masked = state.length == config.segment_length, state.visible is not None
    # A segment of length 0 leaves the memories of its batch element as they are.
    length = jnp.where(complete, config.segment_length, 0)
    segment = Segment(state.tokens, state.visible, length)
    memories, _ = summarize_and_read(
        config, weights, state.memories, segment, always=False
    )
    # The next segment opens with nothing read: `_find_prompt` starts its backbone.
    empty = init_state(config, weights.backbone, complete.shape[0], masked)
    return mechanisms.replace_rows(state, empty, complete)._replace(memories=memories)
