"""What a memory retains: facts, other text, and questions after each piece of it.

A sample is a fact's context, then pieces of passages that do not name its subject or
answer, all of as many tokens; where the context is shorter, other text stands before
it. The question is asked behind every number of pieces that is wanted, and is forgotten
again; the answer is right if it occurs in what is generated greedily, as in the
published programs of M+ (Wang et al., 2025, https://arxiv.org/abs/2502.00592, section
4.3). Samples of a batch have questions of one length, so that nothing is padded.

Shapes: B samples side by side, I pieces, C tokens of a piece, P tokens of a question.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from memjax.data import Passage, Question, Tokenizer, pick_facts, unrelated


class Method(Protocol):
    """Something that is told a text and asked about it; memories are values."""

    @property
    def longest(self) -> int | None:
        """Tokens that it can be told, asked and answer in all; None is any number."""
        ...

    def start(self, batch: int) -> Any:
        """The memory of so many rows that know nothing."""
        ...

    def tell(self, memory: Any, tokens: Int32[np.ndarray, "B C"]) -> Any:
        """The memory after more text."""
        ...

    def ask(
        self, memory: Any, prompt: Int32[np.ndarray, "B P"], count: int
    ) -> Int32[np.ndarray, "B N"]:
        """The likeliest `count` tokens behind a prompt, one by one; nothing is kept."""
        ...


class Samples(NamedTuple):
    """Samples that are asked side by side.

    Attributes:
        facts: one a row.
        context: the piece that ends with the fact's context.
        pieces: what is told after it.
        prompts: the questions.
    """

    facts: list[Question]
    context: Int32[np.ndarray, "B C"]
    pieces: Int32[np.ndarray, "I B C"]
    prompts: Int32[np.ndarray, "B P"]


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


def make_samples(
    facts: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    tokenizer: Tokenizer,
    *,
    samples: int,
    batch: int,
    pieces: int,
    chunk: int,
    seed: int,
) -> list[Samples]:
    """Draws facts in batches whose questions have one length, and text for each.

    Args:
        facts: to draw from; no two that are drawn have a subject or answer in common.
        passages: in the order of their use, each group shuffled for every sample.
        tokenizer: of the model.
        samples: how many; a multiple of `batch`.
        batch: B.
        pieces: I, at least 0.
        chunk: C.
        seed: of facts and passages.

    Raises:
        ValueError: if there are too few facts or passages, or a context has more than
            C tokens.
    """
    if batch < 1 or samples < batch or samples % batch:
        raise ValueError(
            f"samples must be a positive multiple of batch={batch}, got {samples}"
        )
    encode = lambda text: tokenizer.encode(f"\n\n{text}")
    groups: dict[int, list[tuple[Question, np.ndarray]]] = {}
    full = []
    for fact in pick_facts(facts, seed=seed):
        prompt = encode(fact.question)
        group = groups.setdefault(len(prompt), [])
        group.append((fact, prompt))
        if len(group) == batch:
            full.append(groups.pop(len(prompt)))
        if len(full) * batch == samples:
            break
    else:
        raise ValueError(
            f"samples must be at most {len(full) * batch} of these facts, in batches "
            f"of {batch} with questions of one length, got {samples}"
        )
    tokens = {passage: encode(passage.text) for group in passages for passage in group}
    made = []
    for group in full:
        rows = [
            _told(fact, passages, tokens, encode(fact.context), pieces, chunk, seed)
            for fact, _ in group
        ]
        context, more = zip(*rows, strict=True)
        made.append(
            Samples(
                [fact for fact, _ in group],
                np.stack(context),
                np.stack(more, axis=1),
                np.stack([prompt for _, prompt in group]),
            )
        )
    return made


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
        batches: of `make_samples`, with as many pieces as `after` wants.
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
                memory = method.tell(memory, piece)
            if count in after:
                texts: list[str | None] = [None] * len(batch.facts)
                if fits:
                    found = method.ask(memory, batch.prompts, answer)
                    texts = [tokenizer.decode(row) for row in found]
                for fact, text in zip(batch.facts, texts, strict=True):
                    yield Asked(fact, count, text)


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


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share; (0, 1) if nothing was counted."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = share * (1 - share) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _told(fact, passages, tokens, context, pieces, chunk, seed):
    """The piece with the context [C], and the others [I, C]."""
    if len(context) > chunk:
        raise ValueError(
            f"the context of {fact.question!r} has {len(context)} tokens; "
            f"a piece has chunk={chunk}"
        )
    order = _shuffled(fact, passages, seed)
    missing, wanted = chunk - len(context), pieces * chunk
    texts, total = [], 0
    for passage in order:
        if total >= missing + wanted:
            break
        texts.append(tokens[passage])
        total += len(texts[-1])
    if total < missing + wanted:
        raise ValueError(
            f"passages must have {missing + wanted} tokens that name neither "
            f"{fact.subject!r} nor {fact.answer!r}, got {total}: tell fewer pieces"
        )
    stream = np.concatenate([np.zeros(0, np.int32), *texts])
    first = np.concatenate([stream[wanted : wanted + missing], context])
    return first.astype(np.int32), stream[:wanted].reshape(pieces, chunk)


def _shuffled(fact, passages, seed) -> Iterator[Passage]:
    """Passages about other things: group by group, in an order of the fact's own."""
    name = np.frombuffer(f"{seed} {fact.question}".encode(), np.uint8)
    stream = np.random.PCG64(name.tolist())
    for group in passages:
        group = unrelated(group, fact)
        for i in stream.random_raw(len(group)).argsort(kind="stable"):
            yield group[i]
