"""The training tasks of M+: chunks to write into the memory, and a target to read.

A training document gives chunks, which are written, and a target, which is read and
scored: the text after the chunks, or for some documents "Repeat:" and the chunks again.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, sections 3.2.3 and D; proportions
and "Repeat:" follow the published program.

Shapes: B batch elements of this host, n chunks, C longest chunk, T tokens of a target.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

Task = Literal["full_context", "two_chunk", "multi_chunk", "revisit"]
#: Tokens after "Repeat:" that are not scored: they cannot be predicted.
UNSCORED = 5


class Target(NamedTuple):
    """Tokens to read and score; arrays as in `Batch`."""

    tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]
    targets: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]
    mask: Float32[Array, "B T"] | Float32[np.ndarray, "B T"]


class TaskBatch(NamedTuple):
    """The data of one training step.

    Attributes:
        chunks: written in order, padded with 0; n may be 0.
        lengths: number of tokens of each, in [1, C].
        target: read after them.
        num_queries: in [1, T), number of the target's first tokens that are queries of
            the retriever's loss.
        keep: whether the target is stored, to be revisited.
    """

    chunks: Int32[Array, "B n C"] | Int32[np.ndarray, "B n C"]
    lengths: Int32[Array, "B n"] | Int32[np.ndarray, "B n"]
    target: Target
    num_queries: Int32[Array, " B"] | Int32[np.ndarray, " B"]
    keep: Bool[Array, " B"] | Bool[np.ndarray, " B"]


class Assignment(NamedTuple):
    """A task and its data."""

    task: Task
    batch: TaskBatch


@dataclasses.dataclass(frozen=True)
class MPlusTaskConfig:
    """Proportions and lengths; the defaults are those of the paper's third stage.

    Attributes:
        full_context: share of the steps that read a text without writing.
        revisit: share of the steps that read the stored target again, if there is one,
            chunks were written since, and the step before was no revisit.
        multi_chunk: share of all other steps; the rest are two-chunk.
        repeat: share of documents whose target is "Repeat:" and their chunks.
        ask: share of the writing steps with facts in place of documents
            (`fact_tasks.py`).
        replace: probability that a revisited target is replaced by the next document's.
        renew: probability that a written document's target replaces the stored one,
            which was not revisited. Both set the mean distance of a revisit, about 60
            chunks in the paper's stages 1 and 2 and 200 in stage 3.
        chunks: numbers of chunks, sampled uniformly: the length buckets.
        shortest_chunk: a chunk has this many to C tokens.
        target: T, at least 2.
        prompt: number of the target's first tokens, in [1, T), that are the retrieval
            queries and are not scored.
    """

    full_context: float = 0.05
    revisit: float = 0.2
    multi_chunk: float = 0.8
    repeat: float = 0.1
    ask: float = 0.0
    replace: float = 1.0
    renew: float = 0.0
    # Texts of 4k, 8k, 16k, 32k and 64k tokens, in chunks of 512 and the target.
    chunks: tuple[int, ...] = (4, 12, 28, 60, 124)
    shortest_chunk: int = 384
    target: int = 2048
    prompt: int = 64

    def __post_init__(self):
        shares = ("full_context", "revisit", "multi_chunk", "repeat", "ask")
        for name in (*shares, "replace", "renew"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not self.chunks or min(self.chunks) < 1:
            raise ValueError(f"chunks must be numbers of at least 1, got {self.chunks}")
        if len(set(self.chunks)) < len(self.chunks):
            raise ValueError(f"chunks must differ from each other, got {self.chunks}")
        if self.shortest_chunk < 1:
            raise ValueError(
                f"shortest_chunk must be at least 1, got {self.shortest_chunk}"
            )
        if self.target < 2:
            raise ValueError(f"target must be at least 2, got {self.target}")
        if not 1 <= self.prompt < self.target:
            raise ValueError(
                f"prompt must be in [1, target={self.target}), got {self.prompt}"
            )


def lay_out(
    text: Int32[np.ndarray, " W"],
    lengths: Sequence[int],
    chunk: int,
    target: int,
    instruction: Int32[np.ndarray, " I"] | None,
    last: bool,
) -> tuple[Int32[np.ndarray, "n C"], Target]:
    """Cuts a text into chunks and a target, for one batch element.

    Args:
        text: the chunks of a document, and at least T + 1 tokens after them.
        lengths: tokens of each chunk.
        chunk: C.
        target: T.
        instruction: the target is these tokens and the chunks again; None: it is the
            text after the chunks.
        last: take the last chunk only.
    """
    ends = np.cumsum([0, *lengths])
    spans = list(zip(ends[:-1], ends[1:], strict=True))[-1 if last else None :]
    chunks = np.zeros((len(spans), chunk), np.int32)
    for row, (begin, end) in zip(chunks, spans, strict=True):
        row[: end - begin] = text[begin:end]
    after, unscored = text[ends[-1] :], 0
    if instruction is not None:
        after = np.concatenate([instruction, text[spans[0][0] : ends[-1]]])
        unscored = len(instruction) + UNSCORED
    after = after[: target + 1]
    pad, times = (0, target + 1 - len(after)), np.arange(target)
    # Target i is token i + 1.
    scored = (times + 1 >= unscored) & (times + 1 < len(after))
    return chunks, Target(
        tokens=np.pad(after[:-1], (0, pad[1])),
        targets=np.pad(after[1:], (0, pad[1])),
        mask=scored.astype(np.float32),
    )
