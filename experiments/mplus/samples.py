"""Samples of injected text: the context of a fact, chunks of other text, a question.

The other text names neither the fact's subject nor its answer. All chunks have the same
number of tokens; a shorter context is preceded by other text. Samples of a batch have
questions of one length, so that nothing is padded.

Shapes: B batch, I chunks, C tokens of a chunk, P tokens of a question.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.data import Passage, Question, Tokenizer, pick_facts, unrelated


class Samples(NamedTuple):
    """A batch of samples.

    Attributes:
        facts: one for each batch element.
        context: the chunk that ends with the fact's context.
        chunks: what is injected after the context.
        prompts: the questions.
    """

    facts: list[Question]
    context: Int32[np.ndarray, "B C"]
    chunks: Int32[np.ndarray, "I B C"]
    prompts: Int32[np.ndarray, "B P"]


def in_rounds(facts: Sequence[Question]) -> list[Question]:
    """All facts in random order; subjects return once all others were drawn."""
    rest, order = list(facts), []
    while rest:
        order += pick_facts(rest, seed=0)
        taken = set(order)
        rest = [fact for fact in rest if fact not in taken]
    return order


def choose_facts(
    facts: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    samples: int,
    batch: int,
    lengths: int = 0,
    answer_closed_book: Callable[[Int32[np.ndarray, "B P"]], Sequence[str]]
    | None = None,
) -> list[Question]:
    """Facts in batches whose questions have one length, in the order of `facts`.

    Only questions of the `lengths` most frequent lengths are chosen, because programs
    are compiled for each; 0 allows all. Facts that `answer_closed_book` answers
    correctly with an empty memory are left out.
    """
    prompts = [_encode(tokenizer, fact.question) for fact in facts]
    common = Counter(map(len, prompts)).most_common(lengths or None)
    waiting, ready = ({length: [] for length, _ in common} for _ in range(2))
    chosen = []
    for fact, prompt in zip(facts, prompts, strict=True):
        if len(prompt) not in waiting or len(chosen) == samples:
            continue
        group, unknown = waiting[len(prompt)], ready[len(prompt)]
        group.append((fact, prompt))
        if len(group) < batch:
            continue
        texts = [""] * batch
        if answer_closed_book is not None:
            texts = answer_closed_book(np.stack([prompt for _, prompt in group]))
        pairs = zip(group, texts, strict=True)
        unknown += [fact for (fact, _), text in pairs if fact.answer not in text]
        group.clear()
        if len(unknown) >= batch:
            chosen += unknown[:batch]
            del unknown[:batch]
    if len(chosen) < samples:
        raise ValueError(
            f"samples must be at most {len(chosen)} of these facts, in batches "
            f"of {batch} with questions of one length, got {samples}"
        )
    return chosen


def make_samples(
    facts: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    tokenizer: Tokenizer,
    *,
    batch: int,
    num_chunks: int,
    chunk: int,
) -> list[Samples]:
    """Samples of facts, with `num_chunks` of `chunk` tokens of text for each.

    Passages are used in their order, each group shuffled for every sample.
    """
    encode = functools.cache(functools.partial(_encode, tokenizer))
    made = []
    for i in range(0, len(facts), batch):
        some = list(facts[i : i + batch])
        parts = [_sequence(fact, passages, encode, num_chunks, chunk) for fact in some]
        context, chunks = zip(*parts, strict=True)
        prompts = np.stack([encode(fact.question) for fact in some])
        stacked = np.stack(context), np.stack(chunks, axis=1)
        made.append(Samples(some, *stacked, prompts))
    return made


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(f"\n\n{text}")


def _sequence(fact, passages, encode, num_chunks, chunk):
    """The context's chunk [C], and other chunks [I, C]."""
    context = encode(fact.context)
    missing, wanted = chunk - len(context), num_chunks * chunk
    if missing < 0:
        raise ValueError(
            f"chunk must be at least {len(context)}, the tokens of the context of "
            f"{fact.question!r}, got {chunk}"
        )
    texts, total = [], 0
    for passage in _shuffled(fact, passages):
        if total >= missing + wanted:
            break
        texts.append(encode(passage.text))
        total += len(texts[-1])
    if total < missing + wanted:
        raise ValueError(
            f"passages must have {missing + wanted} tokens that name neither "
            f"{fact.subject!r} nor {fact.answer!r}, got {total}: inject fewer chunks"
        )
    stream = np.concatenate([np.zeros(0, np.int32), *texts])
    first = np.concatenate([stream[wanted : wanted + missing], context])
    return first.astype(np.int32), stream[:wanted].reshape(num_chunks, chunk)


def _shuffled(fact, passages) -> Iterator[Passage]:
    """Passages unrelated to the fact, group by group, shuffled by its question."""
    name = np.frombuffer(f"0 {fact.question}".encode(), np.uint8)
    stream = np.random.PCG64(name.tolist())
    for group in passages:
        group = unrelated(group, fact)
        for i in stream.random_raw(len(group)).argsort(kind="stable"):
            yield group[i]
