"""State of HMT, and the trace of its memory.

Shapes: B batch, E width of the backbone's embeddings, L segment, k sensory tokens,
N memories, n segments.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.models.hmt.config import HMTConfig
from memjax.models.language_model.model import LanguageModel


class Memories(NamedTuple):
    """The memories of the segments read so far, in float32.

    Attributes:
        bank: Mem_n of the last N segments, newest last; one slot without retrieval.
        num_valid: number of memories in the bank; its last slots are filled first.
        summary: S_{n-1}; zero where no search needed it, and without retrieval.
        sensory: the last k tokens of segment n-1.
    """

    bank: Float[Array, "B N E"]
    num_valid: Int[Array, " B"]
    summary: Float[Array, "B E"]
    sensory: Int[Array, "B k"]


class HMTState(NamedTuple):
    """Memories of the complete segments, and the open segment, which is not complete.

    Attributes:
        memories: of the complete segments.
        tokens: of the open segment; 0 from `length` on.
        visible: False where a token of it is padding; None if calls have no mask.
        length: number of tokens in the open segment, in [0, L).
        searched: whether the open segment's own summary found its prompt.
        backbone: the backbone's state after prompt, sensory and open tokens; empty
            where `length` is 0.
    """

    memories: Memories
    tokens: Int[Array, "B L"]
    visible: Bool[Array, "B L"] | None
    length: Int[Array, " B"]
    searched: Bool[Array, " B"]
    backbone: PyTree


class SegmentTrace(NamedTuple):
    """Trace of the memory over the n segments of a call.

    Attributes:
        memory: Mem_n.
        summary: S_n; zero without retrieval.
        prompt: P_n.
        scores: softmax over the N slots, newest last; 0 in empty slots, never NaN.
        num_valid: number of memories that could be searched.
        length: number of the segment's tokens that have been read, 0 to L.
    """

    memory: Float[Array, "n B E"]
    summary: Float[Array, "n B E"]
    prompt: Float[Array, "n B E"]
    scores: Float[Array, "n B N"]
    num_valid: Int[Array, "n B"]
    length: Int[Array, "n B"]


def init_state(
    config: HMTConfig, backbone: LanguageModel, batch: int, masked: bool
) -> HMTState:
    """The state before the first token; every leaf has the batch first."""
    # Without a search only the last memory is read.
    slots = config.num_memories if config.retrieval else 1

    def zeros(*shape):
        return jnp.zeros((batch, *shape), jnp.int32)

    memories = Memories(
        bank=jnp.zeros((batch, slots, backbone.width), jnp.float32),
        num_valid=zeros(),
        summary=jnp.zeros((batch, backbone.width), jnp.float32),
        sensory=zeros(config.num_sensory_tokens),
    )
    return HMTState(
        memories=memories,
        tokens=zeros(config.segment_length),
        visible=jnp.zeros((batch, config.segment_length), bool) if masked else None,
        length=zeros(),
        searched=jnp.zeros(batch, bool),
        backbone=backbone.init_state(batch),
    )


def empty_segment(
    memories: Memories, segment: int, dtype: str
) -> tuple[Float[Array, "B L E"], SegmentTrace]:
    """Features and trace of a segment that is empty in every batch element."""
    batch, slots, e = memories.bank.shape
    vector = jnp.zeros((batch, e), jnp.float32)
    length = jnp.zeros(batch, jnp.int32)
    scores = jnp.zeros((batch, slots), jnp.float32)
    # The dtype of the branch that reads, as both branches must agree.
    features = jnp.zeros((batch, segment, e), dtype)
    trace = SegmentTrace(vector, vector, vector, scores, memories.num_valid, length)
    return features, trace
