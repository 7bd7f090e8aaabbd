"""Operations and bytes that a training step of HMT needs, by formula."""

import dataclasses
from typing import Literal

Size = Literal["tiny", "smollm2"]
Trained = Literal["all", "lora"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama with HMT.

    Attributes:
        layers: of the backbone.
        width: E.
        heads: query heads.
        kv_heads: key and value heads.
        hidden: width inside the feed-forward.
        vocab: V.
        tied: whether the head is the embedding.
        retrieval_dim: width of the memory search.
        segment: L.
        sensory: k; j is half of L.
        segments: of a sample.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    tied: bool
    retrieval_dim: int
    segment: int = 256
    sensory: int = 32
    segments: int = 4

    @property
    def layer_parameters(self) -> int:
        """Of all layers, in matrices."""
        key_value = 2 * self.width * self.width // self.heads * self.kv_heads
        feed_forward = 3 * self.width * self.hidden
        return self.layers * (2 * self.width**2 + key_value + feed_forward)

    @property
    def tokens(self) -> int:
        """T, of a sample."""
        return self.segments * self.segment


SHAPES: dict[Size, Shape] = {
    "tiny": Shape(4, 128, 4, 2, 256, 4096, False, 128),
    "smollm2": Shape(30, 576, 9, 3, 1536, 49_152, True, 1536),
}


def operations(shape: Shape, batch: int, trained: Trained) -> dict[str, float]:
    """Floating-point operations of one step, products of matrices alone.

    "needed" has no logits but those of the loss, no summary of the first segment, half
    of the attention's squares and nothing twice; "recompute" runs the segments forward
    once more; "official", as the authors' program, makes logits at all positions and
    carries gradients of all logits of segments back. Low-rank products are left out.
    """
    lengths = [shape.segment + 2] + (shape.segments - 1) * [
        shape.segment + shape.sensory + 2
    ]
    summary = shape.segment // 2 + 2
    # Of one pass over a text: 2 a parameter and token, and causal attention.
    attention = lambda n: 2 * shape.layers * n * (n + 1) * shape.width
    forward = lambda n: 2 * shape.layer_parameters * n + attention(n)
    head = 2 * shape.width * shape.vocab
    # Backward: by inputs and, where weights are trained, by weights.
    back = 2 if trained == "all" else 1
    segments = sum(map(forward, lengths))
    searches = (shape.segments - 1) * forward(summary)
    layers = (1 + back) * (segments + searches)
    calls = sum(lengths) + shape.segments * summary
    official = layers + forward(summary) + head * (calls + back * sum(lengths))
    needed = layers + (1 + back) * head * shape.segment
    return {
        "needed": batch * needed,
        "recompute": batch * (needed + segments + searches),
        "official": batch * official,
    }


def least_bytes(shape: Shape, trained: Trained) -> float:
    """Of memory: weights once a pass and direction, then AdamW's seven arrays."""
    passes = 2 * (2 * shape.segments - 1)
    table = shape.width * shape.vocab
    weights = passes * shape.layer_parameters + 2 * table
    updated = shape.layer_parameters + (1 if shape.tied else 2) * table
    return 4.0 * (weights + (7 * updated if trained == "all" else 0))
