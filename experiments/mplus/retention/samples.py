"""Samples of knowledge retention: a fact, text to forget it by, a question.

A sample is a fact's context, then chunks of passages that name neither its subject nor
its answer. All chunks have the same number of tokens; where the context is shorter,
other text stands before it. Samples of a batch have questions of one length, so that
nothing is padded.

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
from memjax.data.documents.sources import embedded_documents

# Characters of a passage that is cut from a book, about 400 tokens.
PASSAGE = 1_700
# Behind the full stop, before the space that a token begins with.
_ENDS = re.compile(r"(?<=[.!?])(?=\s)")


class Samples(NamedTuple):
    """Samples that are asked side by side.

    Attributes:
        facts: one a row.
        context: the piece that ends with the fact's context.
        answers: first token of the context's sentence with the answer, and the first
            behind it.
        pieces: what is told after it.
        prompts: the questions.
    """

    facts: list[Question]
    context: Int32[np.ndarray, "B C"]
    answers: Int32[np.ndarray, "B 2"]
    pieces: Int32[np.ndarray, "I B C"]
    prompts: Int32[np.ndarray, "B P"]


def make_samples(
    facts: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    tokenizer: Tokenizer,
    *,
    samples: int,
    batch: int,
    pieces: int,
    chunk: int,
    lengths: int = 0,
    seed: int,
    ask: Callable[[Int32[np.ndarray, "B P"]], Sequence[str]] | None = None,
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
        lengths: of the questions: the so many most frequent, as programs are compiled
            for each; 0 is all.
        seed: of facts and passages.
        ask: what is answered to questions by who was told nothing; facts that are
            answered so are left out. None keeps all.

    Raises:
        ValueError: if there are too few facts or passages, or a context has more than
            C tokens or not its answer.
    """
    if batch < 1 or samples < batch or samples % batch:
        raise ValueError(
            f"samples must be a positive multiple of batch={batch}, got {samples}"
        )
    encode = functools.cache(lambda text: tokenizer.encode(f"\n\n{text}"))
    picked = pick_facts(facts, seed=seed)
    full = _grouped(picked, encode, lengths, batch, samples // batch, ask)
    if len(full) * batch < samples:
        raise ValueError(
            f"samples must be at most {len(full) * batch} of these facts, in batches "
            f"of {batch} with questions of one length, got {samples}"
        )
    made = []
    for group in full:
        rows = [_told(fact, passages, encode, pieces, chunk, seed) for fact, _ in group]
        context, answers, more = zip(*rows, strict=True)
        made.append(
            Samples(
                [fact for fact, _ in group],
                np.stack(context),
                np.stack(answers),
                np.stack(more, axis=1),
                np.stack([prompt for _, prompt in group]),
            )
        )
    return made


def book_passages() -> list[Passage]:
    """Whole paragraphs of the embedded books, some 400 tokens each."""
    cut = []
    for document in embedded_documents():
        if document.kind != "prose":
            continue
        passage = ""
        for paragraph in document.text.split("\n\n"):
            passage = f"{passage}\n\n{paragraph}" if passage else paragraph
            if len(passage) >= PASSAGE:
                cut.append(Passage(passage))
                passage = ""
    return cut


def _grouped(
    facts, encode, lengths, batch, count, ask
) -> list[list[tuple[Question, np.ndarray]]]:
    """Up to `count` batches of facts with questions of one length, as they fill up."""
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
        kept += group if ask is None else _unknown(group, ask)
        group.clear()
        if len(kept) >= batch:
            full.append(kept[:batch])
            del kept[:batch]
        if len(full) == count:
            break
    return full


def _unknown(group, ask):
    """The facts whose answer is not in what is answered."""
    texts = ask(np.stack([prompt for _, prompt in group]))
    pairs = zip(group, texts, strict=True)
    return [(fact, prompt) for (fact, prompt), text in pairs if fact.answer not in text]


def _told(fact, passages, encode, pieces, chunk, seed):
    """The piece with the context [C], its sentence, and the other pieces [I, C]."""
    context = encode(fact.context)
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
        texts.append(encode(passage.text))
        total += len(texts[-1])
    if total < missing + wanted:
        raise ValueError(
            f"passages must have {missing + wanted} tokens that name neither "
            f"{fact.subject!r} nor {fact.answer!r}, got {total}: tell fewer pieces"
        )
    stream = np.concatenate([np.zeros(0, np.int32), *texts])
    first = np.concatenate([stream[wanted : wanted + missing], context])
    before = [len(encode(fact.context[:at])) for at in _sentence(fact)]
    answer = missing + np.array(before, np.int32)
    return first.astype(np.int32), answer, stream[:wanted].reshape(pieces, chunk)


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
    """Passages about other things: group by group, in an order of the fact's own."""
    name = np.frombuffer(f"{seed} {fact.question}".encode(), np.uint8)
    stream = np.random.PCG64(name.tolist())
    for group in passages:
        group = unrelated(group, fact)
        for i in stream.random_raw(len(group)).argsort(kind="stable"):
            yield group[i]
