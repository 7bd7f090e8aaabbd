"""Measures what a memory retains: inject facts and other text, query after each chunk.

A query does not change the memory. The answer is right if it occurs in what is
generated greedily, as in the published programs of M+ (Wang et al., 2025,
https://arxiv.org/abs/2502.00592, section 4.3).

Shapes: B batch, C tokens of a chunk, P of a question, N of an answer, F facts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float64, Int32

from experiments.mplus.retention.variants import KeptBytes
from experiments.mplus.samples import Samples
from memjax.data import Tokenizer

#: In the place of a mark where a method has no positions for a question.
NOT_ASKED = "-"
#: Times that subjects are drawn anew for an interval.
RESAMPLES = 10_000


class Method(Protocol):
    """A memory method: injects chunks, answers queries; memories are values."""

    def start(self, batch: int) -> Any:
        """An empty memory for `batch` batch elements."""
        ...

    def inject(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after another chunk."""
        ...

    def query(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"] | None:
        """Continues a prompt greedily by `count` tokens; the memory is unchanged.

        None where the method has no positions for so many tokens.
        """
        ...

    def kept(self, injected: int) -> KeptBytes:
        """What is kept of one batch element after so many injected tokens."""
        ...


def query_batches(
    method: Method,
    batches: Sequence[Samples],
    tokenizer: Tokenizer,
    *,
    after: Sequence[int],
    answer: int,
    carry: bool,
) -> Iterator[list[str]]:
    """Injects each batch of samples chunk by chunk and yields marks of its answers.

    Args:
        method: what is tested.
        batches: of `make_samples`, with at least `after[-1]` chunks.
        tokenizer: of the model.
        after: query after these numbers of chunks, in rising order.
        answer: tokens to generate.
        carry: keep each batch element's memory from sample to sample; False starts
            every sample with an empty memory.

    Yields:
        Of a batch, one string for each of `after`, with a mark for each fact.
    """
    memory = None
    for batch in batches:
        if memory is None or not carry:
            memory = method.start(len(batch.facts))
        marks = []
        for count, chunk in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
            memory = method.inject(memory, chunk)
            if count in after:
                found = method.query(memory, batch.prompts, answer)
                if found is None:
                    marks.append(NOT_ASKED * len(batch.facts))
                    continue
                texts = map(tokenizer.decode, found)
                pairs = zip(batch.facts, texts, strict=True)
                marks.append("".join(mark(fact.answer, text) for fact, text in pairs))
        yield marks


def mark(answer: str, text: str) -> str:
    """ "2" where the text begins with the answer, "1" where it occurs in it, or "0"."""
    if text.lstrip().startswith(answer):
        return "2"
    return "1" if answer in text else "0"


def closed_book_answers(
    method: Method,
    tokenizer: Tokenizer,
    answer: int,
    prompts: Int32[np.ndarray, "B P"],
) -> list[str]:
    """Answers with an empty memory."""
    found = method.query(method.start(len(prompts)), prompts, answer)
    assert found is not None
    return [tokenizer.decode(tokens) for tokens in found]


def right(marks: str) -> Float64[np.ndarray, " F"]:
    """1 for each fact whose answer occurs in what was generated, else 0.

    NaN for those that could not be asked.
    """
    values = {"0": 0.0, "1": 1.0, "2": 1.0, NOT_ASKED: math.nan}
    return np.asarray([values[x] for x in marks], np.float64)


def accuracy(shares: Float64[np.ndarray, " F"]) -> dict[str, Any]:
    """Mean over facts with its interval; of one seed a fact counts 0 or 1."""
    shares = shares[np.isfinite(shares)]
    count = len(shares)
    low, high = wilson(shares.sum(), count)
    mean = float(shares.mean()) if count else math.nan
    return {"questions": count, "accuracy": mean, "low": low, "high": high}


def gain(
    shares: Float64[np.ndarray, " F"],
    base: Float64[np.ndarray, " F"],
    subjects: Sequence[str],
    *,
    seed: int = 0,
) -> dict[str, float] | None:
    """How much larger the share of right answers is, paired by fact; None if no fact
    could be asked of both.

    The interval of 95% is of the bootstrap: subjects are drawn anew, and all of their
    facts with them, because facts of one subject have a context in common.

    Args:
        shares: of each fact, the mean over seeds.
        base: of the same facts, what is compared with.
        subjects: of the facts.
        seed: of the draws.

    Raises:
        ValueError: if they are not of the same facts, or there are none.
    """
    if not len(shares) == len(base) == len(subjects) or not len(shares):
        raise ValueError(
            "shares, base and subjects must be of the same facts, at least one, got "
            f"{len(shares)}, {len(base)} and {len(subjects)}"
        )
    asked = np.isfinite(shares) & np.isfinite(base)
    if not asked.any():
        return None
    shares, base = shares[asked], base[asked]
    _, groups = np.unique(np.asarray(subjects)[asked], return_inverse=True)
    sums = np.bincount(groups, weights=shares - base)
    sizes = np.bincount(groups)
    drawn = np.random.default_rng(seed).multinomial(
        len(sums), np.full(len(sums), 1 / len(sums)), size=RESAMPLES
    )
    low, high = np.quantile((drawn @ sums) / (drawn @ sizes), [0.025, 0.975])
    mean = float((shares - base).mean())
    return {"mean": mean, "low": float(low), "high": float(high)}


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share; (0, 1) if nothing was counted."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = share * (1 - share) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)
