"""The task of notes in real text: a name and its number, asked for later.

Names and numbers are ids of their own between the bytes of documents: only the notes
count, and the text is what a memory has to get past. After a name that is asked for,
the next token should be the number noted; the text never shows it again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt8

from experiments.lab.baselines import compressed_bytes
from memjax.data import Split, load_tokenizer, load_tokens
from memjax.data.batches.batch import Batch

BYTES, NAMES, NUMBERS = 256, 64, 64
FIRST_NUMBER = BYTES + NAMES
VOCAB_SIZE = FIRST_NUMBER + NUMBERS
#: Tokens of a test that hold the notes, and tokens in which they are asked for.
PART = 64


class Notes(NamedTuple):
    """N notes for each of R texts; the length of `part` holds them.

    Attributes:
        names: [R, N], distinct in a text.
        numbers: [R, N], distinct in a text.
        noted: [R, N], even positions of the names in the first part; numbers follow.
        asked: [R, N], even positions of the names in the last part.
    """

    names: Int32[Array, "R N"]
    numbers: Int32[Array, "R N"]
    noted: Int32[Array, "R N"]
    asked: Int32[Array, "R N"]


class Test(NamedTuple):
    """Texts with notes; every distance asks the same questions.

    Attributes:
        notes: what is noted and asked.
        first: [R, PART], the beginning of the texts with their notes.
        text: [R, D], how they go on, up to the greatest distance.
        questions: [R, PART], text with the names asked for.
    """

    notes: Notes
    first: Int32[Array, "R P"]
    text: Int32[Array, "R D"]
    questions: Int32[Array, "R P"]


def choose(key: Array, rows: int, among: int, count: int) -> Int32[Array, "R N"]:
    """`count` different numbers below `among`, in random order, for each of `rows`."""

    def order(key):
        return jax.random.permutation(key, among)[:count]

    return jax.vmap(order)(jax.random.split(key, rows))


def draw_notes(key: Array, rows: int, count: int, part: int) -> Notes:
    """Draws `count` notes, at most `part // 2`, for each of `rows` texts."""
    keys = jax.random.split(key, 4)
    return Notes(
        names=BYTES + choose(keys[0], rows, NAMES, count),
        numbers=FIRST_NUMBER + choose(keys[1], rows, NUMBERS, count),
        noted=2 * choose(keys[2], rows, part // 2, count),
        asked=2 * choose(keys[3], rows, part // 2, count),
    )


def text_of(split: Split) -> UInt8[np.ndarray, " T"]:
    """The bytes of all embedded documents of a split, one after the other."""
    documents = load_tokens("embedded", load_tokenizer("bytes"), split)
    return np.concatenate([d.tokens for d in documents]).astype(np.uint8)


def training_batch(
    text: Array, rows: int, counts: tuple[int, ...], length: int, key: Array
) -> Batch:
    """`rows` texts of `length`, as many of each count of notes.

    Notes are in the first half, questions in the second.
    """
    parts = [
        _excerpts(text, rows // len(counts), n, length, jax.random.fold_in(key, n))
        for n in counts
    ]
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))


def _excerpts(text, rows, count, length, key) -> Batch:
    place, draw = jax.random.split(key)
    start = jax.random.randint(place, (rows,), 0, text.shape[0] - length)
    tokens = text[start[:, None] + jnp.arange(length)[None]].astype(jnp.int32)
    half = length // 2
    notes = draw_notes(draw, rows, count, half)
    row, asked = jnp.arange(rows)[:, None], half + notes.asked
    tokens = _write(tokens, notes).at[row, asked].set(notes.names)
    return Batch(
        tokens=tokens,
        targets=jnp.zeros_like(tokens).at[row, asked].set(notes.numbers),
        mask=jnp.zeros((rows, length)).at[row, asked].set(1.0),
        reset=jnp.ones(rows, bool),
    )


def _write(tokens: Int32[Array, "R T"], notes: Notes) -> Int32[Array, "R T"]:
    """Puts names and numbers where they are noted."""
    row = jnp.arange(tokens.shape[0])[:, None]
    tokens = tokens.at[row, notes.noted].set(notes.names)
    return tokens.at[row, notes.noted + 1].set(notes.numbers)


def draw_test(split: Split, rows: int, count: int, distance: int, seed: int) -> Test:
    """`rows` texts of each document of a split, from places drawn at random.

    At most `distance` tokens are between the notes and the questions.
    """
    rng = np.random.default_rng([seed, count])
    length, texts = PART + distance + PART, []
    for document in load_tokens("embedded", load_tokenizer("bytes"), split):
        if len(document.tokens) < length:
            raise ValueError(
                f"distance={distance} must be at most {len(document.tokens) - 2 * PART}"
                f": {document.name} has {len(document.tokens)} bytes"
            )
        starts = rng.integers(0, len(document.tokens) - length + 1, rows)
        texts += [document.tokens[start : start + length] for start in starts]
    tokens = jnp.asarray(np.stack(texts), jnp.int32)
    first, text, last = jnp.split(tokens, (PART, PART + distance), axis=1)
    key = jax.random.fold_in(jax.random.key(seed), count)
    notes = draw_notes(key, len(texts), count, PART)
    row = jnp.arange(len(texts))[:, None]
    questions = last.at[row, notes.asked].set(notes.names)
    return Test(notes, _write(first, notes), text, questions)


def fits_as_text(test: Test, distance: int, budget: int) -> Bool[np.ndarray, "R N"]:
    """Notes that the last `budget` bytes of a text still hold when it is asked about.

    A note counts as one byte for each of its ids, which favours this baseline.
    """
    since = (
        PART - np.asarray(test.notes.noted) + distance + np.asarray(test.notes.asked)
    )
    return since <= budget


def fits_as_compressed_text(
    test: Test, distance: int, budget: int
) -> Bool[np.ndarray, "R N"]:
    """The same of a text in LZMA's form: all notes of a text, or none.

    Only the text after the notes is counted.
    """
    texts = np.asarray(test.text[:, :distance], np.uint8)
    sizes = [compressed_bytes(x.tobytes()) for x in texts]
    fits = np.asarray(sizes)[:, None] <= budget
    return np.broadcast_to(fits, test.notes.names.shape)
