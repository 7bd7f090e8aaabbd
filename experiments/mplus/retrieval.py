"""Retrieval quality: do reads of M+ retrieve the rows that hold a fact?

    python -m experiments.mplus.retrieval --model RUN

Question: of the rows that a fact was written to, what share does a read retrieve from
the long-term store when the fact's question is asked? (M+, Figure 6.)
Rows: the retriever that is learned with the model, and one that is fitted afterwards,
by distance in tokens. Columns: share of the rows of the answer's sentence and of the
fact's whole context, each as a multiple of a random choice, whose share is the last
column.
Not shown: rows in the short-term pool; sentences whose tokens have no row of their own,
as only a chunk's last K tokens do.

Shapes: B batch, L layers, P tokens of a question.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Int

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    table,
    times,
    write_report,
)
from experiments.mplus import models
from experiments.mplus.methods import LatentMemory
from experiments.mplus.samples import Samples, choose_facts, make_samples
from memjax.data import pick_facts
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import MPlusState

SOURCES = {
    "mplus/retrieval": "learned with the model",
    "mplus/retrieval_fitted": "fitted afterwards",
}
#: Facts are queried after these numbers of chunks; a chunk is one or more of M+'s, so
#: that the context has memory tokens of its own.
AFTER, CHUNK = (4, 8, 16), 512
#: Facts, those side by side, and lengths of questions that are drawn.
SAMPLES, BATCH, LENGTHS = 12, 4, 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; both retrievers take 25 minutes on two cores.

    Attributes:
        model: run folder of an M+.
        output: folder of the results.
    """

    model: Path
    output: Path = RESULTS


def main(config: Config) -> None:
    """Injects, queries and counts with both retrievers; writes the results."""
    learned, tokenizer = models.load_trained(config.model)
    fitted = models.with_fitted_retriever(learned, tokenizer, config.model)
    facts = pick_facts(models.load_facts(), seed=0)
    batches = make_samples(
        choose_facts(facts, tokenizer, samples=SAMPLES, batch=BATCH, lengths=LENGTHS),
        models.passages(),
        tokenizer,
        batch=BATCH,
        num_chunks=AFTER[-1],
        chunk=CHUNK,
    )
    for name, model in zip(SOURCES, (learned, fitted), strict=True):
        counted = [inject_and_count(model, batch, AFTER) for batch in batches]
        rows = {
            after: summary(model.config, [found[after] for found in counted])
            for after in AFTER
        }
        write_report(
            config.output / name,
            "does M+ retrieve the rows that hold a fact?",
            settings(config),
            {
                "recipe": models.recipe(config.model),
                "memory": dataclasses.asdict(model.config),
                "distances": [count * CHUNK for count in AFTER],
                "after": rows,
            },
        )


class Found(NamedTuple):
    """Rows of the context's chunk by layer, and the number of rows in the store.

    `answer_*` are of the sentence with the answer alone; `retrieved` are of the rows in
    the store those that a read retrieves.
    """

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
    """Rows that were written in a span of the clock, counted.

    `answers` are first tokens of the answer's sentence and of what follows it.
    """
    model = nnx.merge(graph, params)
    config = model.config
    # As `MPlus.generate` reads a question: without it, its first token selects alone.
    options = ReadOptions(prompt_length=prompt.shape[1])
    _, trace = model.trace_read(state, prompt, options)
    store = state.store
    assert store is not None and trace.chosen is not None and trace.scores is not None
    # The clock goes up by one with every row written, and `born` is its value.
    first, last = (span + 1)[:, :, None, None]
    begin, end = jnp.moveaxis(answers, 1, 0)[:, :, None, None]

    def of_answer(born):
        chunk, row = jnp.divmod(born - first, config.num_memory_tokens)
        token = (chunk + 1) * config.chunk_size - config.num_memory_tokens + row
        return (token >= begin) & (token < end)

    def count(rows):
        return rows.sum(axis=-1, dtype=jnp.int32)

    born = jnp.stack([layer.born for layer in store.layers], axis=1)
    held = jnp.arange(born.shape[2])[None, None] < store.num_valid[:, None, None]
    stored = (born >= first) & (born < last) & held
    chosen = jnp.moveaxis(trace.chosen, 0, 1)
    scores = jnp.moveaxis(trace.scores, 0, 1)
    take = functools.partial(jnp.take_along_axis, axis=-1)
    real = take(scores, chosen) > -jnp.inf
    answer = stored & of_answer(born)
    return Found(
        store=count(stored),
        retrieved=count(take(stored, chosen) & real),
        answer_store=count(answer),
        answer_retrieved=count(take(answer, chosen) & real),
        held=store.num_valid,
    )


def summary(config: MPlusConfig, found: Sequence[Found]) -> dict[str, Any]:
    """Retrieved shares of the rows in the store, over facts and layers.

    "answer" counts those of the sentence with the answer alone.
    """
    store, retrieved, answer_store, answer_retrieved, held = (
        np.concatenate(x) for x in zip(*found, strict=True)
    )
    random = np.minimum(1, config.num_retrieved / np.maximum(held, 1))[:, None]
    return {
        **_shares(store, retrieved, random),
        "answer": _shares(answer_store, answer_retrieved, random),
    }


def _shares(store, retrieved, random) -> dict[str, Any]:
    """Retrieved share, and that of a random choice; NaN where the store has no rows."""
    rows, chance, found = store.sum(), (store * random).sum(), retrieved.sum()
    return {
        "share": float(found / rows) if rows else math.nan,
        "share_random": float(chance / rows) if rows else math.nan,
        "times_random": float(found / chance) if chance else math.nan,
    }


@table("mplus/retrieval", *SOURCES)
def retrieval(*results: dict[str, Any]) -> Rows:
    """Shares of rows that both retrievers find, against chance."""
    for name, result in zip(SOURCES.values(), results, strict=True):
        for distance, row in zip(
            result["distances"], result["after"].values(), strict=True
        ):
            answer = row["answer"]
            yield {
                "retriever": name,
                "tokens since": number(distance, 0),
                "rows of the answer's sentence": number(answer["share"], 2),
                "against chance": times(answer["times_random"]),
                "rows of the fact's context": number(row["share"], 2),
                "context against chance": times(row["times_random"]),
                "chance": number(row["share_random"], 2),
            }
        yield models.recipe_text(result["recipe"])


if __name__ == "__main__":
    main(tyro.cli(Config))
