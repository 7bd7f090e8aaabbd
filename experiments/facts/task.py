"""The task of facts in a log: names and codes in plain bytes, asked in other words.

A log has statements such as "code QX=7" in twelve wordings between the bytes of
documents. A quarter of the facts is stated again later, with another code, which is
then the right one. Nothing marks a statement: all is text of one alphabet, in places of
`SLOT` bytes. Questions, such as "ring QX?7", have wordings of their own, and no word of
the statements but the name.
"""

import functools
import string
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from experiments.memories.text import text_of
from memjax.data import Split
from memjax.data.batches.batch import Batch

#: Bytes of a statement with the text around it, and of a question with its answer.
SLOT = 32
CODES, VOCAB_SIZE = string.digits + string.ascii_uppercase, 256
#: A fact in this many is stated again.
OVERWRITTEN = 4
_LISTS = Path(__file__).with_name("wordings.txt").read_text("utf-8").split("\n\n")
#: Names, and wordings of statements and of questions with a name and its code.
NAMES = _LISTS[0].split()
STATEMENTS, QUESTIONS = (tuple(x.splitlines()) for x in _LISTS[1:])


class Texts(NamedTuple):
    """Wordings with every name, as bytes.

    Attributes:
        bytes_: [W, N, SLOT], codes left open; zeros behind the text.
        sizes: [W, N], bytes of a text.
        codes: [W, N], where its code is.
    """

    bytes_: UInt8[np.ndarray, "W N S"]
    sizes: Int32[np.ndarray, "W N"]
    codes: Int32[np.ndarray, "W N"]


def _texts(wordings: tuple[str, ...]) -> Texts:
    shape = len(wordings), len(NAMES)
    found = Texts(np.zeros((*shape, SLOT), np.uint8), *np.zeros((2, *shape), np.int32))
    for w, wording in enumerate(wordings):
        for n, name in enumerate(NAMES):
            text = f"\n{wording.format(name, '#')}\n".encode()
            found.bytes_[w, n, : len(text)] = np.frombuffer(text, np.uint8)
            found.sizes[w, n], found.codes[w, n] = len(text), text.index(b"#")
    return found


STATED, ASKED = _texts(STATEMENTS), _texts(QUESTIONS)


class Log(NamedTuple):
    """The facts of R logs of one number N of facts.

    Attributes:
        tokens: [R, T], the log.
        names: [R, N], distinct in a log.
        codes: [R, N], those that are right at the end.
        places: [R, N], where each is stated for the last time.
    """

    tokens: Int32[Array, "R T"]
    names: Int32[Array, "R N"]
    codes: Int32[Array, "R N"]
    places: Int32[Array, "R N"]


def _from(start: Int32[Array, "*S"]) -> Int32[Array, "*S SLOT"]:
    """The bytes of a slot, counted from `start`."""
    return (
        jax.lax.broadcasted_iota(jnp.int32, (*start.shape, SLOT), start.ndim)
        - (start[..., None])
    )


def _fill(texts: Texts, wording: Array, name: Array, code: Array) -> tuple[Array, ...]:
    """Wordings [*S, SLOT] with names and codes, their sizes, and where codes are."""
    at = jnp.asarray(texts.codes)[wording, name]
    written = jnp.asarray([*CODES.encode()])[code]
    text = jnp.asarray(texts.bytes_)[wording, name]
    found = jnp.where(_from(at) == 0, written[..., None], text)
    return found, jnp.asarray(texts.sizes)[wording, name], at


def _put(slots: Array, at: Array, text: Array, sizes: Array, offset: Array) -> Array:
    """Writes texts [R, M, SLOT] into slots [R, T, SLOT], from an `offset` [R, M]."""
    source = _from(offset)
    moved = jnp.take_along_axis(text, jnp.clip(source, 0, SLOT - 1), axis=-1)
    inside = (source >= 0) & (source < sizes[..., None])
    row = jnp.arange(slots.shape[0])[:, None]
    return slots.at[row, at].set(jnp.where(inside, moved, slots[row, at]))


def choose(key: Array, rows: int, among: int, count: int) -> Int32[Array, "R N"]:
    """`count` different numbers below `among`, in random order, for each of `rows`."""

    def order(key):
        return jax.random.permutation(key, among)[:count]

    return jax.vmap(order)(jax.random.split(key, rows))


@functools.partial(jax.jit, static_argnames="count")
def write_log(tokens: Int32[Array, "R T"], count: int, key: Array) -> Log:
    """Writes `count` facts, and a quarter of them anew, into places of the texts."""
    rows, length = tokens.shape
    again = count // OVERWRITTEN
    total, places = count + again, length // SLOT
    keys = jax.random.split(key, 5)
    names = choose(keys[0], rows, len(NAMES), count)
    at = choose(keys[1], rows, places, total)
    # Of a fact that is stated twice the later place has the code that is right.
    first, later = at[:, :again], at[:, count:]
    at = at.at[:, :again].set(jnp.minimum(first, later))
    at = at.at[:, count:].set(jnp.maximum(first, later))
    codes = jax.random.randint(keys[2], (rows, total), 0, len(CODES))
    stated = jnp.concatenate([names, names[:, :again]], axis=1)
    wording = jax.random.randint(keys[3], (rows, total), 0, len(STATEMENTS))
    text, sizes, _ = _fill(STATED, wording, stated, codes)
    room = jax.random.uniform(keys[4], (rows, total)) * (SLOT + 1 - sizes)
    slots = tokens.reshape(rows, places, SLOT)
    slots = _put(slots, at, text, sizes, room.astype(jnp.int32))
    last = jnp.concatenate([codes[:, count:], codes[:, again:count]], axis=1)
    ends = jnp.concatenate([at[:, count:], at[:, again:count]], axis=1)
    return Log(slots.reshape(rows, length), names, last, ends * SLOT)


@jax.jit
def questions(names: Array, codes: Array, key: Array) -> Batch:
    """A question for each name [*S], its answer to be given: [*S, SLOT] of a batch.

    The target is the byte of the code, predicted from what is before it.
    """
    wording = jax.random.randint(key, names.shape, 0, len(QUESTIONS))
    text, _, at = _fill(ASKED, wording, names, codes)
    mask = _from(at - 1) == 0
    targets = jnp.roll(text, -1, axis=-1) * mask
    return Batch(text, targets, mask.astype(jnp.float32), jnp.ones(names.shape, bool))


def training_batch(
    text: Array, rows: int, counts: tuple[int, ...], length: int, key: Array
) -> Batch:
    """`rows` texts of `length`, as many of each count of facts.

    Five eighths of a text are the log; the rest asks, as often as there is room, for
    facts of it.
    """
    parts = [
        _text(text, rows // len(counts), n, length, jax.random.fold_in(key, n))
        for n in counts
    ]
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))


def _text(text, rows, count, length, key) -> Batch:
    keys = jax.random.split(key, 5)
    start = jax.random.randint(keys[0], (rows,), 0, text.shape[0] - length)
    tokens = text[start[:, None] + jnp.arange(length)[None]].astype(jnp.int32)
    slots = length // SLOT
    half = slots * 5 // 8
    log = write_log(tokens[:, : half * SLOT], count, keys[1])
    asked = min(count, slots - half)
    which = choose(keys[2], rows, count, asked)
    names, codes = (
        jnp.take_along_axis(x, which, axis=1) for x in (log.names, log.codes)
    )
    found = questions(names, codes, keys[3])
    rest = tokens[:, half * SLOT :].reshape(rows, slots - half, SLOT)
    at = choose(keys[4], rows, slots - half, asked)
    row = jnp.arange(rows)[:, None]

    def put(into, value):
        return into.at[row, at].set(value).reshape(rows, -1)

    inside = jnp.where(found.tokens > 0, found.tokens, rest[row, at])
    none = jnp.zeros(rest.shape)
    pad = ((0, 0), (half * SLOT, 0))
    return Batch(
        tokens=jnp.concatenate([log.tokens, put(rest, inside)], axis=1),
        targets=jnp.pad(put(none.astype(jnp.int32), found.targets), pad),
        mask=jnp.pad(put(none, found.mask), pad),
        reset=jnp.ones(rows, bool),
    )


class Stream(NamedTuple):
    """R streams with one number of facts; every distance asks the same questions.

    Attributes:
        log: with N facts each.
        text: [R, D], the bytes of documents behind the log.
        questions: [R, N, SLOT] of a batch, a question for each fact.
    """

    log: Log
    text: UInt8[np.ndarray, "R D"]
    questions: Batch


def draw_streams(
    split: Split, rows: int, count: int, log: int, distance: int, seed: int
) -> Stream:
    """`rows` streams: a log of `log` bytes, then `distance` bytes of text.

    The text is that of all embedded documents of a split, which have more bytes, one
    after the other and round again, from places drawn at random.
    """
    text = text_of(split)
    starts = np.random.default_rng([seed, count]).integers(0, len(text), rows)
    rounds = np.stack([np.roll(text, -start)[: log + distance] for start in starts])
    one, two = jax.random.split(jax.random.fold_in(jax.random.key(seed), count))
    first = write_log(jnp.asarray(rounds[:, :log], jnp.int32), count, one)
    return Stream(first, rounds[:, log:], questions(first.names, first.codes, two))
