"""Measures what a memory retains: inject facts and other text, query after each chunk.

A query does not change the memory. The answer is right if it occurs in what is
generated greedily, as in the published programs of M+ (Wang et al., 2025,
https://arxiv.org/abs/2502.00592, section 4.3).

Shapes: B batch, C tokens of a chunk, P of a question, N of an answer.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from experiments.mplus.retention.samples import Samples
from memjax.data import Question, Tokenizer


class Method(Protocol):
    """Something that is told a text and asked about it; memories are values."""

    @property
    def longest(self) -> int | None:
        """Tokens that it can be told, asked and answer in all; None is any number."""
        ...

    def start(self, batch: int) -> Any:
        """The memory of so many rows that know nothing."""
        ...

    def inject(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after more text."""
        ...

    def query(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"]:
        """The likeliest `count` tokens behind a prompt, one by one; nothing is kept."""
        ...


class Asked(NamedTuple):
    """A question that was asked.

    Attributes:
        fact: it was about.
        pieces: told since its context.
        text: generated; None where the method cannot be told so much.
    """

    fact: Question
    pieces: int
    text: str | None


def run(
    method: Method,
    batches: Sequence[Samples],
    tokenizer: Tokenizer,
    *,
    after: Sequence[int],
    answer: int,
    carry: bool,
) -> Iterator[Asked]:
    """Tells and asks; yields what was asked when a batch is done with it.

    Args:
        method: what is tested.
        batches: of `retention_samples`, with as many pieces as `after` wants.
        tokenizer: of the model.
        after: numbers of pieces told before a question, rising.
        answer: tokens to generate.
        carry: a row goes on with the memory of the sample before; False starts anew.
    """
    memory, told = None, 0
    for batch in batches:
        if memory is None or not carry:
            memory, told = method.start(len(batch.facts)), 0
        for count, piece in enumerate([batch.context, *batch.pieces][: after[-1] + 1]):
            told += piece.shape[1]
            needed = told + batch.prompts.shape[1] + answer
            fits = method.longest is None or needed <= method.longest
            if fits:
                memory = method.inject(memory, piece)
            if count in after:
                texts: list[str | None] = [None] * len(batch.facts)
                if fits:
                    found = method.query(memory, batch.prompts, answer)
                    texts = [tokenizer.decode(row) for row in found]
                for fact, text in zip(batch.facts, texts, strict=True):
                    yield Asked(fact, count, text)


def untold(
    method: Method,
    tokenizer: Tokenizer,
    answer: int,
    prompts: Int32[np.ndarray, "B P"],
) -> list[str]:
    """What is answered without anything told."""
    found = method.query(method.start(len(prompts)), prompts, answer)
    return [tokenizer.decode(row) for row in found]


def accuracy(asked: Sequence[Asked]) -> dict[str, Any]:
    """Share of right answers with its interval, of those that could be asked.

    "begins" counts answers that the generated text begins with: a stricter measure, as
    "4" occurs in "14".
    """
    texts = [(x.fact.answer, x.text) for x in asked if x.text is not None]
    hits = sum(answer in text for answer, text in texts)
    begins = sum(text.lstrip().startswith(answer) for answer, text in texts)
    low, high = wilson(hits, len(texts))
    share = lambda count: count / len(texts) if texts else math.nan
    return {
        "questions": len(texts),
        "accuracy": share(hits),
        "low": low,
        "high": high,
        "begins": share(begins),
    }


def summary(asked: Sequence[Asked], after: Sequence[int]) -> dict[str, Any]:
    """Accuracy behind each number of pieces, and behind all by relation."""
    kinds = sorted({x.fact.kind for x in asked})
    return {
        "after": {
            count: accuracy([x for x in asked if x.pieces == count]) for count in after
        },
        "by_kind": {
            kind: {
                count: accuracy(
                    [x for x in asked if (x.fact.kind, x.pieces) == (kind, count)]
                )
                for count in after
            }
            for kind in kinds
        },
    }


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share; (0, 1) if nothing was counted."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = share * (1 - share) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)
