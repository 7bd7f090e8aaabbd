"""What HMT is given, what it carries, and what it can tell: see `hmt.py`.

Shapes: B batch, E width of the backbone's embeddings, L segment, k sensory tokens,
N memories, n segments.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.checks import check_sizes, require_known


@dataclasses.dataclass(frozen=True)
class HMTConfig:
    """Sizes of the memory; the defaults are the paper's for small backbones.

    Attributes:
        segment: L, new tokens a segment.
        sensory: k in [0, L], tokens of the segment before that are read again.
        memories: N, how many segments back the search sees.
        retrieval_dim: d_h; None is the backbone's width.
        summary_fraction: j = round(L * fraction) tokens are summarised; in (0, 1].
        retrieval: False is the recurrence alone, P_n = Mem_{n-1}: stage 1 of training.
        summary_source: S_n searches for P_n ("current", as the paper), or S_{n-1}
            does ("previous", strictly causal).
        activations: what the backward pass keeps of a segment: everything, or what the
            backbone's `remat` leaves ("keep"); nothing ("recompute"); or the layers'
            inputs in the host's memory ("offload").
    """

    segment: int = 1024
    sensory: int = 32
    memories: int = 300
    retrieval_dim: int | None = None
    summary_fraction: float = 0.5
    retrieval: bool = True
    summary_source: Literal["current", "previous"] = "current"
    activations: Literal["keep", "recompute", "offload"] = "recompute"

    def __post_init__(self):
        check_sizes(segment=self.segment, memories=self.memories)
        if self.retrieval_dim is not None:
            check_sizes(retrieval_dim=self.retrieval_dim)
        if not 0 <= self.sensory <= self.segment:
            raise ValueError(
                f"sensory must be in [0, segment={self.segment}], got {self.sensory}"
            )
        if not 1 <= self.summary <= self.segment:
            raise ValueError(
                f"summary_fraction={self.summary_fraction} of segment={self.segment} "
                f"makes j={self.summary}, which must be in [1, {self.segment}]"
            )
        require_known("summary_source", self.summary_source, ("current", "previous"))
        allowed = ("keep", "recompute", "offload")
        require_known("activations", self.activations, allowed)

    @property
    def summary(self) -> int:
        """j, the tokens that are summarised."""
        return int(round(self.segment * self.summary_fraction))

    @property
    def reads_ahead(self) -> bool:
        """Whether logits of a segment's first j tokens have seen all of these."""
        return self.retrieval and self.summary_source == "current"

    @property
    def choice(self) -> int:
        """Memories from which a search depends on its summary: one is no choice."""
        return 2 if self.reads_ahead else 1


class Memories(NamedTuple):
    """What is carried from segment to segment, in float32.

    Attributes:
        bank: Mem_n of the last segments, newest last; one slot without retrieval.
        held: how many slots are filled.
        summary: S_{n-1}; zero where no search needed it, and without retrieval.
        sensory: the last k tokens of segment n-1.
    """

    bank: Float[Array, "B N E"]
    held: Int[Array, " B"]
    summary: Float[Array, "B E"]
    sensory: Int[Array, "B k"]


class HMTState(NamedTuple):
    """The memories, and the segment that is not complete.

    Attributes:
        memories: of the complete segments.
        tokens: the open segment's tokens, 0 from `filled` on.
        visible: False where a token of it is padding; None unless made for masks.
        filled: tokens in it, in [0, L).
        searched: whether its prompt was found by its own summary.
        backbone: the backbone's state after prompt, sensory and these tokens; empty
            where `filled` is 0.
    """

    memories: Memories
    tokens: Int[Array, "B L"]
    visible: Bool[Array, "B L"] | None
    filled: Int[Array, " B"]
    searched: Bool[Array, " B"]
    backbone: PyTree


class SegmentTrace(NamedTuple):
    """What the memory did in each of the n segments that a call touched.

    Attributes:
        memory: Mem_n.
        summary: S_n; zero without retrieval.
        prompt: P_n.
        scores: softmax over the N slots, newest last, 0 where empty; NaN-free.
        held: memories there were to search.
        tokens: tokens of the segment that are known, 0 to L.
    """

    memory: Float[Array, "n B E"]
    summary: Float[Array, "n B E"]
    prompt: Float[Array, "n B E"]
    scores: Float[Array, "n B N"]
    held: Int[Array, "n B"]
    tokens: Int[Array, "n B"]


def nothing(
    memories: Memories, segment: int, dtype: str
) -> tuple[Float[Array, "B L E"], SegmentTrace]:
    """Features and trace of a segment in which no row has tokens."""
    batch, slots, e = memories.bank.shape
    row = jnp.zeros((batch, e), jnp.float32)
    known = jnp.zeros(batch, jnp.int32)
    scores = jnp.zeros((batch, slots), jnp.float32)
    features = jnp.zeros((batch, segment, e), dtype)
    return features, SegmentTrace(row, row, row, scores, memories.held, known)
