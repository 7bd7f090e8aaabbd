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
    """A memory method: injects chunks, answers queries; memories are values."""

    @property
    def longest(self) -> int | None:
        """Maximal tokens injected, queried and generated in all; None is unlimited."""
        ...

    def start(self, batch: int) -> Any:
        """An empty memory for `batch` batch elements."""
        ...

    def inject(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after another chunk."""
        ...

    def query(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"]:
        """Continues a prompt greedily by `count` tokens; the memory is unchanged."""
        ...


class QueryResult(NamedTuple):
    """The answer to one query.

    Attributes:
        fact: the fact that was queried.
        num_chunks: chunks injected since the fact's context.
        text: the generated text; None if the method has no room for so many tokens.
    """

    fact: Question
    num_chunks: int
    text: str | None


def inject_and_query(
    method: Method,
    batches: Sequence[Samples],
    tokenizer: Tokenizer,
    *,
    after: Sequence[int],
    answer: int,
    carry: bool,
) -> Iterator[QueryResult]:
    """Injects each batch of samples chunk by chunk and yields the query results.

    Args:
        method: what is tested.
        batches: of `make_samples`, with at least `after[-1]` chunks.
        tokenizer: of the model.
        after: query after these numbers of chunks, in rising order.
        answer: tokens to generate.
        carry: keep each batch element's memory from sample to sample; False starts
            every sample with an empty memory.
    """
    memory, injected = None, 0
    for batch in batches:
        if memory is None or not carry:
            memory, injected = method.start(len(batch.facts)), 0
        for count, chunk in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
            injected += chunk.shape[1]
            needed = injected + batch.prompts.shape[1] + answer
            fits = method.longest is None or needed <= method.longest
            if fits:
                memory = method.inject(memory, chunk)
            if count in after:
                texts: list[str | None] = [None] * len(batch.facts)
                if fits:
                    found = method.query(memory, batch.prompts, answer)
                    texts = [tokenizer.decode(tokens) for tokens in found]
                for fact, text in zip(batch.facts, texts, strict=True):
                    yield QueryResult(fact, count, text)


def closed_book_answers(
    method: Method,
    tokenizer: Tokenizer,
    answer: int,
    prompts: Int32[np.ndarray, "B P"],
) -> list[str]:
    """Answers with an empty memory."""
    found = method.query(method.start(len(prompts)), prompts, answer)
    return [tokenizer.decode(tokens) for tokens in found]


def accuracy(results: Sequence[QueryResult]) -> dict[str, Any]:
    """Share of right answers with its interval, of the queries that were possible.

    "begins" counts answers that the generated text begins with: a stricter measure, as
    "4" occurs in "14".
    """
    texts = [(x.fact.answer, x.text) for x in results if x.text is not None]
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


def summary(results: Sequence[QueryResult], after: Sequence[int]) -> dict[str, Any]:
    """Accuracy after each number of chunks: of all facts, and by kind of fact."""
    kinds = sorted({x.fact.kind for x in results})
    return {
        "after": {
            count: accuracy([x for x in results if x.num_chunks == count])
            for count in after
        },
        "by_kind": {
            kind: {
                count: accuracy(
                    [x for x in results if (x.fact.kind, x.num_chunks) == (kind, count)]
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
