"""Reading segments: the backbone reads each with its memory prompt.

    Y = BBM([P_n ‖ last k tokens of segment n-1 ‖ H_n ‖ P_n])    eqs. (4) and (5)
    Mem_n = Y_last;   M ← [M, Mem_n], the newest N

P_n is the memory prompt that retrieval found, the last k tokens are the sensory memory,
and H_n are the segment's tokens. He et al. (2024), https://arxiv.org/abs/2405.06067,
section 3.3.

Shapes: B batch, T time, n segments, L segment, E width.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.retrieval import Segment, search, summarize_segments
from memjax.models.hmt.state import HMTState, Memories, SegmentTrace, empty_segment
from memjax.models.hmt.weights import Weights
from memjax.models.remat import cond_with_remat, remat

# Segments of a call that are compiled one by one instead of as a loop.
MAX_UNROLLED = 8


def join_open_segment(
    state: HMTState,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
) -> Segment:
    """The open segment and the new tokens after it, as n segments.

    n is what T tokens touch at most, wherever in its segment a batch element is: the
    last segment may have no tokens. `lengths` are the tokens of each that count.
    """
    size, new = state.tokens.shape[1], tokens.shape[1]
    # An open segment has at most L - 1 tokens.
    n = -(-(size - 1 + new) // size)

    def join(open_segment, new):
        joined = ragged.join(open_segment, state.length, new, n * size)
        return jnp.moveaxis(joined.reshape(joined.shape[0], n, size), 1, 0)

    visible = None
    if state.visible is not None:
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        visible = join(state.visible, mask)
    starts = jnp.arange(n, dtype=jnp.int32)[:, None] * size
    read = state.length + (new if lengths is None else lengths.astype(jnp.int32))
    length = jnp.clip(read[None] - starts, 0, size)
    return Segment(join(state.tokens, tokens), visible, length)


def read_segments(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    segments: Segment,
    always_summarize: bool,
) -> tuple[Memories, Float[Array, "n B L E"], SegmentTrace]:
    """Reads n segments in turn; the last is skipped if it has no tokens at all."""
    before = jax.tree.map(lambda x: x[:-1], segments)
    last = jax.tree.map(lambda x: x[-1], segments)
    memories, outputs = _read_in_turn(
        config, weights, memories, before, always_summarize
    )
    memories, output = _read_last(config, weights, memories, last, always_summarize)

    def append(a, b):
        return jnp.concatenate([a, b[None]])

    return memories, *jax.tree.map(append, outputs, output)


def _read_in_turn(config, weights, memories, segments, always_summarize):
    """A scan over full segments, with precomputed summaries."""
    # No branch inside the loop below: the backward pass of one would save the
    # backbone's parameters, which enter it, once a segment.
    summaries = summarize_segments(
        config, weights, memories.num_valid, segments, always_summarize
    )

    def read(memories, x):
        return read_segment(config, weights, memories, *x)

    # Without a loop no saved activation is copied, but there is more to compile.
    unroll = config.activations == "keep" and summaries.shape[0] <= MAX_UNROLLED
    return jax.lax.scan(
        remat(config.activations, read), memories, (segments, summaries), unroll=unroll
    )


def _read_last(config, weights, memories, segment, always_summarize):
    """The last segment; zeros if it is empty in every batch element."""
    read = functools.partial(summarize_and_read, config, always=always_summarize)
    # `cond_with_remat` runs the branch again in the backward pass as it is. Offloading
    # decides what that second run saves.
    if config.activations == "offload":
        read = remat(config.activations, read)
    dtype = weights.backbone.config.dtype

    def skip(weights, memories, segment):
        return (memories, empty_segment(memories, config.segment_length, dtype))

    return cond_with_remat(
        config.activations,
        jnp.any(segment.length > 0),
        read,
        skip,
        weights,
        memories,
        segment,
    )


def summarize_and_read(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    segment: Segment,
    *,
    always: bool,
) -> tuple[Memories, tuple[Float[Array, "B L E"], SegmentTrace]]:
    """One segment with its own summary, if a search needs it or `always`."""
    one = jax.tree.map(lambda x: x[None], segment)
    (summary,) = summarize_segments(config, weights, memories.num_valid, one, always)
    return read_segment(config, weights, memories, segment, summary)


def read_segment(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    segment: Segment,
    summary: Float[Array, "B E"],
) -> tuple[Memories, tuple[Float[Array, "B L E"], SegmentTrace]]:
    """Equations (2) to (5) of one segment; complete ones become memories."""
    searching = summary if config.reads_ahead else memories.summary
    prompt, scores = search(config, weights, memories, searching)
    x, start = augment(config, weights, memories, prompt, segment.tokens)
    end = start + segment.length
    # The second prompt follows the last token, at any length.
    x = ragged.put(x, end, prompt.astype(x.dtype))
    mask = None
    if segment.visible is not None:
        mask = ragged.mask(segment.visible, start, segment.length, x.shape[1])
    # A whole sequence without a state: memory passes between segments through P_n
    # alone.
    y = weights.backbone.encode(x, mask)
    memory = ragged.take(y, end[:, None])[:, 0].astype(jnp.float32)
    positions = (
        start[:, None] + jnp.arange(config.segment_length, dtype=jnp.int32)[None]
    )
    trace = SegmentTrace(
        memory, summary, prompt, scores, memories.num_valid, segment.length
    )
    # Whether a summary was computed depends on the other batch elements. Zeros where no
    # search needs it keep the state independent of them.
    needed = memories.num_valid >= config.min_memories_to_choose
    grown = Memories(
        bank=jnp.concatenate([memories.bank[:, 1:], memory[:, None]], axis=1),
        num_valid=jnp.minimum(memories.num_valid + 1, memories.bank.shape[1]),
        summary=jnp.where(needed[:, None], summary, 0.0),
        sensory=segment.tokens[:, config.segment_length - config.num_sensory_tokens :],
    )
    # An open segment is read again when it is complete, and becomes a memory then.
    complete = segment.length == config.segment_length
    memories = mechanisms.replace_rows(memories, grown, complete)
    return memories, (ragged.take(y, positions), trace)


def augment(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    prompt: Float[Array, "B E"],
    tokens: Int[Array, "B T"],
) -> tuple[Float[Array, "B _ E"], Int[Array, " B"]]:
    """Equation (4): [P, sensory, tokens, room for P], and the first token's position.

    A document's first segment has no sensory memory before it.
    """
    x, k = weights.backbone.embed(tokens), config.num_sensory_tokens
    parts = [prompt[:, None].astype(x.dtype), x]
    if k:
        parts.insert(1, weights.backbone.embed(memories.sensory))
    x = jnp.concatenate([*parts, jnp.zeros_like(parts[0])], axis=1)
    # Zeros of an empty state are no tokens, and so must not be read as sensory memory.
    first = memories.num_valid == 0
    return (ragged.drop(x, k, first) if k else x), jnp.where(first, 1, 1 + k)
