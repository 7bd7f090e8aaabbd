"""Where the memory tokens of a text are: in M+'s pool, its store, or retrieved.

Shapes: B batch, L layers, P tokens of a question.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from experiments.mplus.memories import LatentMemory
from experiments.mplus.samples import Samples
from memjax.evaluation.statistics import standard_error
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import MPlusState


class Found(NamedTuple):
    """Memory tokens of the context's chunk, by layer, and the size of the store.

    Attributes:
        pool: in the short-term pool.
        store: in the long-term store.
        retrieved: of those, what a read retrieves.
        answer_store: as `store`, of the sentence with the answer alone. Only a chunk's
            last K tokens have memory tokens of their own.
        answer_retrieved: as `retrieved`, likewise.
        held: memory tokens in the store.
    """

    pool: Int[Array, "B L"]
    store: Int[Array, "B L"]
    retrieved: Int[Array, "B L"]
    answer_store: Int[Array, "B L"]
    answer_retrieved: Int[Array, "B L"]
    held: Int[Array, " B"]


def inject_and_count(
    model: MPlus, batch: Samples, after: Sequence[int]
) -> dict[int, Found]:
    """Injects one batch, and counts after each number of chunks in `after`."""
    memory = LatentMemory(model)
    state = memory.start(len(batch.facts))
    before = np.asarray(state.clock)
    end, found = None, {}
    for count, chunk in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
        state = memory.inject(state, chunk)
        # The first chunk is the one with the context.
        end = np.asarray(state.clock) if end is None else end
        if count in after:
            span = jnp.asarray(np.stack([before, end]))
            prompt = jnp.asarray(batch.prompts)
            answers = jnp.asarray(batch.answers)
            counts = count_rows(*nnx.split(model), state, prompt, span, answers)
            found[count] = jax.tree.map(np.asarray, counts)
    return found


@functools.partial(jax.jit, static_argnums=0)
def count_rows(
    graph: Any,
    params: Any,
    state: MPlusState,
    prompt: Int[Array, "B P"],
    span: Int[Array, "2 B"],
    answers: Int[Array, "B 2"],
) -> Found:
    """Where the memory tokens are that were written in a span of the clock.

    Args:
        graph: of `nnx.split`, as `params`.
        params: the model's.
        state: the memory.
        prompt: the question, all of which chooses what is retrieved.
        span: clock before and after the text that is counted was written.
        answers: of its tokens, first of the answer's sentence and first after it.
    """
    model = nnx.merge(graph, params)
    config = model.config
    # As `MPlus.generate` reads a question: without this its first token chooses alone.
    options = ReadOptions(prompt_length=prompt.shape[1])
    _, trace = model.trace_read(state, prompt, options)
    store = state.store
    assert store is not None and trace.chosen is not None and trace.scores is not None
    # The clock goes up by one with every memory token written, and `born` is its value.
    first, last = (span + 1)[:, :, None, None]
    inside = lambda born: (born >= first) & (born < last)
    begin, end = jnp.moveaxis(answers, 1, 0)[:, :, None, None]

    def of_answer(born):
        chunk, row = jnp.divmod(born - first, config.tokens)
        token = (chunk + 1) * config.chunk - config.tokens + row
        return (token >= begin) & (token < end)

    count = lambda rows: rows.sum(axis=-1, dtype=jnp.int32)
    positions = lambda size: jnp.arange(size, dtype=jnp.int32)[None]
    size = state.pool.shape[2]
    filled = positions(size) >= size - state.num_valid[:, None]
    born = jnp.stack([layer.born for layer in store.layers], axis=1)
    stored = (
        inside(born) & (positions(born.shape[2]) < store.num_valid[:, None])[:, None]
    )
    chosen = jnp.moveaxis(trace.chosen, 0, 1)
    scores = jnp.moveaxis(trace.scores, 0, 1)
    take = functools.partial(jnp.take_along_axis, axis=-1)
    real = take(scores, chosen) > -jnp.inf
    answer = stored & of_answer(born)
    return Found(
        pool=count(inside(state.clock[:, None, None] - state.ages) & filled[:, None]),
        store=count(stored),
        retrieved=count(take(stored, chosen) & real),
        answer_store=count(answer),
        answer_retrieved=count(take(answer, chosen) & real),
        held=store.num_valid,
    )


def summary(config: MPlusConfig, chunk: int, found: Sequence[Found]) -> dict[str, Any]:
    """Means over facts and layers, in memory tokens of a layer and as shares.

    "answer" counts those of the sentence with the answer alone.
    """
    made = chunk // config.chunk_size * config.num_memory_tokens
    pool, store, retrieved, answer_store, answer_retrieved, held = (
        np.concatenate(x) for x in zip(*found, strict=True)
    )
    taken = np.minimum(config.num_retrieved, held)[:, None]
    return {
        "facts": len(store),
        "rows_made": made,
        "rows_in_pool": float(pool.mean()),
        "store_held": float(held.mean()),
        **_shares(store, retrieved, taken, held),
        "answer": _shares(answer_store, answer_retrieved, taken, held),
        "still_known": float((pool + store).mean() / made),
        "read": float((pool + retrieved).mean() / made),
    }


def _shares(store, retrieved, taken, held) -> dict[str, Any]:
    """How many of the memory tokens in the store are retrieved.

    "random" and "best" are the shares of a random and of a perfect choice. The error is
    that of the mean over facts, because layers are not independent. NaN where the
    store has none.
    """
    random = store * taken / np.maximum(held, 1)[:, None]
    best = np.minimum(store, taken)
    total = store.sum(axis=1)
    some = total > 0
    shares = retrieved.sum(axis=1)[some] / total[some]
    share = lambda part: _ratio(part.sum(), store.sum())
    count = int(some.sum())
    return {
        "rows_in_store": float(store.mean()),
        "rows_retrieved": float(retrieved.mean()),
        "rows_at_random": float(random.mean()),
        "rows_at_best": float(best.mean()),
        "share": share(retrieved),
        "share_random": share(random),
        "share_best": share(best),
        "standard_error": standard_error(shares),
        "times_random": _ratio(retrieved.sum(), random.sum()),
        "facts_with_rows": count,
        "share_by_layer": [
            _ratio(*sums)
            for sums in zip(retrieved.sum(axis=0), store.sum(axis=0), strict=True)
        ],
    }


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan
