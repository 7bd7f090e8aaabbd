"""Answers about facts in a log: of a model that has read on, and of text read again.

A model answers copies of its state at each distance. What is not trained is the text,
plain or compressed, and a list of the facts, all read by one who makes no mistake.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.facts import task
from experiments.lab.baselines import NGram, compressed_bytes
from experiments.memories.text import text_of
from memjax.data import TokenisedDocument, load_tokenizer, load_tokens
from memjax.models import LanguageModel

#: Bytes of a log; bytes that are read in one call.
LOG, PIECE = 4096, 256
#: Of the n-gram of the compressed text, and the fewest bits that a byte takes in it.
ORDER, LEAST_BITS = 5, 1.0


def answer(
    model: LanguageModel, streams: Mapping[int, task.Stream], distances: Sequence[int]
) -> dict[int, np.ndarray]:
    """Right answers [distances, R, N] of each number of facts N.

    Texts are read once, all together: questions are asked of copies of the state.
    """
    graph, params = nnx.split(model)
    parts = [np.concatenate([x.log.tokens, x.text], 1) for x in streams.values()]
    text = jnp.asarray(np.concatenate(parts).astype(np.uint8))
    state, read = model.init_state(len(text)), 0
    found: dict[int, list[np.ndarray]] = {n: [] for n in streams}
    for distance in distances:
        last = (LOG + distance) // PIECE
        state, read = _read(graph, params, state, text, read, last), last
        first = 0
        for n, stream in streams.items():
            rows = slice(first, first := first + len(stream.text))
            own = jax.tree.map(lambda x, rows=rows: x[rows], state)
            found[n].append(np.asarray(_ask(graph, params, own, stream.questions)))
    return {n: np.stack(x) for n, x in found.items()}


@functools.partial(jax.jit, static_argnums=0)
def _read(graph, params, state, text, first, last):
    """The state after pieces `first` to `last` of the texts."""
    model = nnx.merge(graph, params)

    def piece(i, state):
        tokens = jax.lax.dynamic_slice_in_dim(text, i * PIECE, PIECE, 1)
        return model(state, tokens.astype(jnp.int32))[0]

    return jax.lax.fori_loop(first, last, piece, state)


@functools.partial(jax.jit, static_argnums=0)
def _ask(graph, params, state, questions):
    """Right answers [R, N]; all questions start from one state."""
    shape = questions.tokens.shape
    copies = jax.tree.map(lambda x: jnp.repeat(x, shape[1], axis=0), state)
    tokens = questions.tokens.reshape(-1, shape[2])
    _, logits = nnx.merge(graph, params)(copies, tokens)
    hit = logits.argmax(axis=-1).reshape(shape) == questions.targets
    return (hit & (questions.mask > 0)).any(axis=-1)


def read_again(
    budgets: Sequence[int],
    distances: Sequence[int],
    streams: Mapping[int, task.Stream],
    parameters: int,
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Right answers of text that is read again, by budget, row and count.

    `parameters` are those of a model: LZMA's text begins with as many bytes.
    """
    documents = load_tokens("embedded", load_tokenizer("bytes"), "train")
    ngram = NGram(documents, ORDER, task.VOCAB_SIZE)
    # A model stores its parameters beside its state; LZMA gets the same bytes of text.
    prime = text_of("train").tobytes()[-4 * parameters :]
    primed = compressed_bytes(prime)

    def lzma(text: np.ndarray) -> float:
        return compressed_bytes(prime + text.tobytes()) - primed

    def ppm(text: np.ndarray) -> float:
        losses = ngram.losses([TokenisedDocument("", "", text)])
        return float(losses.nll.sum()) / math.log(2) / 8

    def share(size: Callable[[np.ndarray], float], budget, stream, distance) -> float:
        # The log itself is not counted. Longer texts are not tried: none fits.
        if distance * LEAST_BITS > 8 * budget:
            return 1 / len(task.CODES)
        fits = [size(text[:distance]) <= budget for text in stream.text]
        return float(np.where(fits, 1, 1 / len(task.CODES)).mean())

    def plain(budget, stream, distance) -> float:
        since = LOG + distance - np.asarray(stream.log.places)
        return float(np.where(since <= budget, 1, 1 / len(task.CODES)).mean())

    def listed(budget, stream, distance) -> float:
        # Names and codes are known to be all that counts.
        each = sum(math.ceil(math.log2(len(x))) for x in (task.NAMES, task.CODES))
        return min(1.0, budget / math.ceil(stream.log.names.shape[1] * each / 8))

    kinds = {
        "text": plain,
        "text, LZMA": functools.partial(share, lzma),
        f"text, PPM of order {ORDER}": functools.partial(share, ppm),
        "dictionary": listed,
    }
    return {
        str(budget): {
            name: {
                str(n): [kind(budget, x, d) for d in distances]
                for n, x in streams.items()
            }
            for name, kind in kinds.items()
        }
        for budget in budgets
    }
