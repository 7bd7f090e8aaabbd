"""Samples of injected text: the context of a fact, chunks of other text, a question.

The other text names neither the fact's subject nor its answer. All chunks have the same
number of tokens; a shorter context is preceded by other text. Samples of a batch have
questions of one length, so that nothing is padded.

Shapes: B batch, I chunks, C tokens of a chunk, P tokens of a question.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.data import Passage, Question, Tokenizer, pick_facts, unrelated

# After the full stop and before the space, because a token begins with its space.
_ENDS = re.compile(r"(?<=[.!?])(?=\s)")


class Samples(NamedTuple):
    """A batch of samples.

    Attributes:
        facts: one for each batch element.
        context: the chunk that ends with the fact's context.
        answers: first token of the context's sentence with the answer, and the first
            token after that sentence.
        chunks: what is injected after the context.
        prompts: the questions.
    """

    facts: list[Question]
    context: Int32[np.ndarray, "B C"]
    answers: Int32[np.ndarray, "B 2"]
    chunks: Int32[np.ndarray, "I B C"]
    prompts: Int32[np.ndarray, "B P"]


def make_samples(
    facts: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    tokenizer: Tokenizer,
    *,
    samples: int,
    batch: int,
    num_chunks: int,
    chunk: int,
    lengths: int = 0,
    seed: int,
    apart: bool = False,
    answer_closed_book: Callable[[Int32[np.ndarray, "B P"]], Sequence[str]]
    | None = None,
) -> list[Samples]:
    """Draws facts in batches whose questions have one length, and text for each.

    Args:
        facts: to draw from.
        passages: in the order of their use, each group shuffled for every sample.
        tokenizer: of the model.
        samples: how many; a multiple of `batch`.
        batch: B.
        num_chunks: I, at least 0.
        chunk: C.
        lengths: only questions of this many most frequent lengths are drawn, because
            programs are compiled for each length; 0 allows all.
        seed: of facts and passages.
        apart: no memory ever holds two samples. Then subjects and answers may return,
            once all others were drawn; else no two of the facts have one in common.
        answer_closed_book: answers questions with an empty memory; facts that it
            answers correctly are left out. None draws from all facts.

    Raises:
        ValueError: if there are too few facts or passages, or a context has more than
            C tokens or not its answer.
    """
    if batch < 1 or samples < batch or samples % batch:
        raise ValueError(
            f"samples must be a positive multiple of batch={batch}, got {samples}"
        )
    encode = functools.cache(lambda text: tokenizer.encode(f"\n\n{text}"))
    picked = _in_rounds(facts, seed) if apart else pick_facts(facts, seed=seed)
    full = _grouped(
        picked, encode, lengths, batch, samples // batch, answer_closed_book
    )
    if len(full) * batch < samples:
        raise ValueError(
            f"samples must be at most {len(full) * batch} of these facts, in batches "
            f"of {batch} with questions of one length, got {samples}"
        )
    asked = [fact for group in full for fact, _ in group]
    sizes = {"batch": batch, "num_chunks": num_chunks, "chunk": chunk}
    return samples_of(asked, passages, tokenizer, **sizes, seed=seed)


def samples_of(
    facts: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    tokenizer: Tokenizer,
    *,
    batch: int,
    num_chunks: int,
    chunk: int,
    seed: int,
) -> list[Samples]:
    """The samples that `make_samples` made of these facts, in their order."""
    encode = functools.cache(lambda text: tokenizer.encode(f"\n\n{text}"))
    sizes = num_chunks, chunk
    return [
        _batch(facts[i : i + batch], passages, encode, sizes, seed)
        for i in range(0, len(facts), batch)
    ]


def _in_rounds(facts: Sequence[Question], seed: int) -> list[Question]:
    """All facts: those that go together first, then those that do of the rest."""
    rest, order = list(facts), []
    while rest:
        picked = pick_facts(rest, seed=seed)
        order += picked
        taken = set(picked)
        rest = [fact for fact in rest if fact not in taken]
    return order


def _batch(facts, passages, encode, sizes, seed) -> Samples:
    """A batch of these facts, and what is injected with each."""
    num_chunks, chunk = sizes
    sequences = [
        _sequence(fact, passages, encode, num_chunks, chunk, seed) for fact in facts
    ]
    context, answers, chunks = zip(*sequences, strict=True)
    return Samples(
        list(facts),
        np.stack(context),
        np.stack(answers),
        np.stack(chunks, axis=1),
        np.stack([encode(fact.question) for fact in facts]),
    )


def _grouped(
    facts, encode, lengths, batch, count, answer_closed_book
) -> list[list[tuple[Question, np.ndarray]]]:
    """Up to `count` batches of facts, each with questions of one length."""
    prompts = [encode(fact.question) for fact in facts]
    common = Counter(map(len, prompts)).most_common(lengths or None)
    waiting, ready = ({length: [] for length, _ in common} for _ in range(2))
    full = []
    for fact, prompt in zip(facts, prompts, strict=True):
        if len(prompt) not in waiting:
            continue
        group, kept = waiting[len(prompt)], ready[len(prompt)]
        group.append((fact, prompt))
        if len(group) < batch:
            continue
        kept += _unknown(group, answer_closed_book)
        group.clear()
        if len(kept) >= batch:
            full.append(kept[:batch])
            del kept[:batch]
        if len(full) == count:
            break
    return full


def _unknown(group, answer_closed_book):
    """The facts of a group that are not answered correctly with an empty memory."""
    if answer_closed_book is None:
        return group
    texts = answer_closed_book(np.stack([prompt for _, prompt in group]))
    pairs = zip(group, texts, strict=True)
    return [(fact, prompt) for (fact, prompt), text in pairs if fact.answer not in text]


def _sequence(fact, passages, encode, num_chunks, chunk, seed):
    """The context's chunk [C], the answer's sentence in it, other chunks [I, C]."""
    context = encode(fact.context)
    if len(context) > chunk:
        raise ValueError(
            f"the context of {fact.question!r} has {len(context)} tokens; "
            f"a chunk has {chunk}"
        )
    order = _shuffled(fact, passages, seed)
    missing, wanted = chunk - len(context), num_chunks * chunk
    texts, total = [], 0
    for passage in order:
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
    before = [len(encode(fact.context[:at])) for at in _sentence(fact)]
    answer = missing + np.array(before, np.int32)
    return first.astype(np.int32), answer, stream[:wanted].reshape(num_chunks, chunk)


def _sentence(fact) -> tuple[int, int]:
    """Where the context's first sentence with the answer begins, and ends."""
    at = fact.context.find(fact.answer)
    if at < 0:
        raise ValueError(
            f"the context of {fact.question!r} must hold {fact.answer!r}, it does not"
        )
    begin = max((x.start() for x in _ENDS.finditer(fact.context, 0, at)), default=0)
    after = _ENDS.search(fact.context, at + len(fact.answer))
    return begin, len(fact.context) if after is None else after.start()


def _shuffled(fact, passages, seed) -> Iterator[Passage]:
    """Passages unrelated to the fact, group by group, shuffled by seed and question."""
    name = np.frombuffer(f"{seed} {fact.question}".encode(), np.uint8)
    stream = np.random.PCG64(name.tolist())
    for group in passages:
        group = unrelated(group, fact)
        for i in stream.random_raw(len(group)).argsort(kind="stable"):
            yield group[i]
