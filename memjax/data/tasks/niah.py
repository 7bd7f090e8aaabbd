"""Single needle in a haystack: the three S-NIAH tasks of RULER, as text and as batches.

A sentence with a "special magic" value for a key is hidden among others, and the
question at the end asks for the value. Hsieh et al. (2024),
https://arxiv.org/abs/2404.06654, tasks niah_single_1 to 3: templates, noise sentence,
40 depths, seven-digit numbers and version-4 UUIDs are RULER's. Ours are the 4,096 keys
(RULER joins longer word lists, also as adjective-noun), the essays (the caller's text)
and a rule for sentence ends in place of a trained splitter.
"""

import re
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from memjax.checks import check_numbers, check_sizes, require_all, require_instance
from memjax.data.batches.batch import Batch
from memjax.data.documents.tokenizer import Tokenizer

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    "There and back again."
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
TEMPLATE = (
    "A special magic {kind} is hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)
ADJECTIVES = (
    "able amber ancient bitter bold brave bright broad calm careful clever cold common "
    "crisp curious damp dark deep distant dry eager early even faint fair famous fast "
    "fierce fine firm flat fond free fresh gentle glad golden grand grave great happy "
    "hollow honest humble keen kind large late light lively lone loud lucky merry mild "
    "narrow noble pale plain proud quick quiet rapid rare"
).split()
NOUNS = (
    "anchor apple arrow basket beacon bell bird blanket boat bottle branch bridge "
    "brook button candle canyon carpet castle chair circle cloud coast copper corner "
    "cottage curtain desert door engine falcon feather field finger flame forest "
    "fountain garden gate glove hammer harbour hill horse island jacket kettle kite "
    "ladder lamp lantern lemon letter marble meadow mirror mountain needle ocean "
    "paper pebble pencil piano pocket river"
).split()


class NeedleTask(NamedTuple):
    """Kind of haystack and of needle.

    Attributes:
        haystack: "noise" repeats five short sentences; "essay" is running text.
        kind: of the value: a seven-digit number, an adjective-noun word, or a UUID.
    """

    haystack: Literal["noise", "essay"]
    kind: Literal["number", "word", "uuid"]


#: By the papers' names: pass-key, number, and niah_single_3, the UUID in an essay.
NEEDLE_TASKS = {
    "S-NIAH-PK": NeedleTask("noise", "number"),
    "S-NIAH-N": NeedleTask("essay", "number"),
    "S-NIAH-W": NeedleTask("essay", "uuid"),
}


class NeedleSample(NamedTuple):
    """One question.

    Attributes:
        prompt: haystack with the needle, question, and the opening of the answer.
        answer: expected text after a space.
    """

    prompt: str
    answer: str


def needle_sample(
    seed: Sequence[int],
    task: NeedleTask,
    length: int,
    tokenizer: Tokenizer,
    essay: Sequence[str] = (),
    start: Literal["opening", "random"] = "opening",
    depth: int | float | None = None,
) -> NeedleSample:
    """Returns a sample whose prompt and answer have at most `length` tokens.

    The haystack is the longest that fits, to within a few tokens: RULER's rule, without
    a reserve for a longer answer.

    Args:
        seed: integers >= 0; equal seeds give equal samples.
        task: see `NeedleTask`.
        length: maximum tokens of prompt and answer.
        tokenizer: counts them.
        essay: the words of the essays, repeated as needed; used for "essay" only.
        start: the haystack begins with the essays, as RULER's does, or at a random
            word: for models that train on the task and could memorise it.
        depth: of the needle, from 0 at the haystack's beginning to 100 at its end; None
            samples it, as RULER does.

    Raises:
        ValueError: `length` is too small for the question and one piece of haystack, an
            essay task comes without an essay, or `depth` is out of range.
    """
    require_all("seed", seed, int)
    require_instance("task", task, NeedleTask)
    require_instance("tokenizer", tokenizer, Tokenizer)
    check_sizes(length=length)
    if depth is not None:
        check_numbers(depth=depth)
    if depth is not None and not 0 <= depth <= 100:
        raise ValueError(f"depth must be in [0, 100], got {depth}")
    if task.haystack == "essay" and not essay:
        raise ValueError("essay is empty; an essay task needs its words")
    rng = _Random(seed)
    key, value = _word(rng), _value(rng, task.kind)
    # RULER samples 40 depths in an essay, and any place in noise.
    in_essay = int(DEPTHS[rng.below(40)]) / 100
    in_noise = rng.below(2**32) / 2**32
    if depth is not None:
        in_essay = in_noise = depth / 100
    first = rng.below(len(essay)) if essay and start == "random" else 0

    def prompt(size: int) -> str:
        needle = NEEDLE.format(kind=task.kind, key=key, value=value)
        if task.haystack == "noise":
            pieces, index, joint = [NOISE] * size, int(in_noise * size), "\n"
        else:
            words = [essay[(first + i) % len(essay)] for i in range(size)]
            pieces = _sentences(" ".join(words))
            index, joint = int(in_essay * len(pieces)), " "
        context = joint.join([*pieces[:index], needle, *pieces[index:]])
        return TEMPLATE.format(kind=task.kind, key=key, context=context)

    size = _fit(prompt, length - len(tokenizer.encode(f" {value}")), tokenizer)
    return NeedleSample(prompt(size), value)


def needle_batch(
    seed: Sequence[int],
    batch: int,
    task: NeedleTask,
    length: int,
    tokenizer: Tokenizer,
    essay: Sequence[str] = (),
    start: Literal["opening", "random"] = "opening",
) -> Batch:
    """Returns samples as rows of `length` tokens; only the answer's tokens are scored.

    A row is the prompt's tokens, then those of " " and the answer, then id 0 under mask
    0. Row r is `needle_sample([*seed, r], ...)` with the same arguments.

    Raises:
        ValueError: as `needle_sample`, or `batch` below 1.
    """
    check_sizes(batch=batch, length=length)
    require_instance("seed", seed, Sequence)
    tokens, targets = np.zeros((2, batch, length), np.int32)
    mask = np.zeros((batch, length), np.float32)
    for row in range(batch):
        sample = needle_sample([*seed, row], task, length, tokenizer, essay, start)
        prompt = tokenizer.encode(sample.prompt)
        answer = tokenizer.encode(f" {sample.answer}")
        ids = np.concatenate([prompt, answer])
        tokens[row, : len(ids)] = ids
        targets[row, : len(ids) - 1] = ids[1:]
        mask[row, len(prompt) - 1 : len(ids) - 1] = 1
    return Batch(tokens, targets, mask, np.ones(batch, bool))


class _Random:
    """Integers from raw bits, the part of numpy.random that never changes."""

    def __init__(self, seed: Sequence[int]):
        self._bits = np.random.PCG64(np.random.SeedSequence(list(seed)))

    def below(self, bound: int) -> int:
        return int(self._bits.random_raw()) % bound


def _word(rng: _Random) -> str:
    adjective, noun = ADJECTIVES[rng.below(64)], NOUNS[rng.below(64)]
    return f"{adjective}-{noun}"


def _value(rng: _Random, kind: str) -> str:
    match kind:
        case "number":
            return str(10**6 + rng.below(9 * 10**6))
        case "word":
            return _word(rng)
        case "uuid":
            high, low = rng.below(2**64), rng.below(2**64)
            return str(uuid.UUID(int=(high << 64) | low, version=4))
        case _:
            raise ValueError(f"kind={kind!r} must be one of number, word, uuid")


def _sentences(text: str) -> list[str]:
    """Splits after . ! or ? and closing quotes, before a capital letter."""
    return re.split(r"(?:(?<=[.!?])|(?<=[.!?][\"')]))\s+(?=[\"'(]?[A-Z])", text)


def _fit(prompt, limit: int, tokenizer: Tokenizer) -> int:
    """The haystack's size: an estimate, reduced until the prompt fits."""

    def count(size: int) -> int:
        # Of the whole prompt: tokens at the joints depend on both sides.
        return len(tokenizer.encode(prompt(size)))

    least, probe = count(1), 16
    if least > limit:
        raise ValueError(
            f"length leaves {limit} tokens for the prompt; the question and one piece "
            f"of haystack need {least}"
        )
    each = (count(probe) - least) / (probe - 1)
    size = 1 + int((limit - least) / each)
    # Pieces vary in tokens, so that the estimate may be too large.
    while (excess := count(size) - limit) > 0:
        size = max(1, size - max(1, int(excess / each)))
    return size
