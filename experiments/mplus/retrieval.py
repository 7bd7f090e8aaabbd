"""Retrieval quality: do reads of M+ retrieve the rows that hold a fact?

    python -m experiments.mplus.retriever --model RUN --output fitted.safetensors
    python -m experiments.mplus.retrieval --model RUN --retriever fitted.safetensors

Question: of the rows that a fact was written to, what share does a read retrieve from
the long-term store when the fact's question is asked? (M+, Figure 6.)
Rows: the retriever that is learned with the model, and one that is fitted afterwards,
by distance in tokens. Columns: share of the rows of the answer's sentence and of the
fact's whole context, each as a multiple of a random choice, whose share is the last
column. In the file "best" is a perfect choice.
Not shown: rows in the short-term pool; sentences whose tokens have no row of their own,
as only a chunk's last K tokens do.

Shapes: B batch, L layers, P tokens of a question.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
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
    figure,
    number,
    settings,
    show,
    table,
    thousands,
    times,
    write_report,
)
from experiments.mplus import models, retriever
from experiments.mplus.methods import LatentMemory
from experiments.mplus.samples import Samples, make_samples
from memjax.checks import check_sizes
from memjax.evaluation.drawing import drawing, source_of
from memjax.evaluation.statistics import standard_error
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import MPlusState

SOURCES = {
    "mplus/retrieval": "learned with the model",
    "mplus/retrieval_fitted": "fitted afterwards",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the defaults take 12 minutes on two cores.

    Attributes:
        model: run folder of an M+.
        retriever: a file of `experiments.mplus.retriever`; none is the model's own.
        store: rows of the store; 0 is the model's number.
        samples: number of facts, a multiple of `batch`.
        batch: facts side by side.
        lengths: number of the most frequent lengths of questions that are drawn.
        after: query after these numbers of chunks, rising.
        chunk: tokens of a chunk, a multiple of the memory's; contexts must fit.
        seed: of the draws.
        output: where .json and .png go, without the ending.
    """

    model: Path
    retriever: Path | None = None
    store: int = 0
    samples: int = 12
    batch: int = 4
    lengths: int = 2
    after: tuple[int, ...] = (4, 8, 16)
    chunk: int = 512
    seed: int = 0
    output: Path = RESULTS / "mplus" / "retrieval"

    def __post_init__(self):
        check_sizes(samples=self.samples, batch=self.batch, chunk=self.chunk)
        if not self.after or list(self.after) != sorted({*self.after}):
            raise ValueError(f"after must rise, got {self.after}")


def main(config: Config) -> None:
    """Injects, queries and counts; prints, plots and writes the results."""
    model, tokenizer = models.load_trained("model", config.model)
    check(config, model)
    if config.store:
        model = models.with_store(model, config.store)
    if config.retriever is not None:
        model = retriever.read(model, config.retriever)
    batches = make_samples(
        models.load_facts_of("test"),
        models.passages(),
        tokenizer,
        samples=config.samples,
        batch=config.batch,
        num_chunks=config.after[-1],
        chunk=config.chunk,
        lengths=config.lengths,
        seed=config.seed,
    )
    counted = [inject_and_count(model, batch, config.after) for batch in batches]
    rows = {
        after: summary(model.config, [found[after] for found in counted])
        for after in config.after
    }
    distances = [count * config.chunk for count in rows]
    result = write_report(
        config.output,
        "does M+ retrieve the rows that hold a fact?",
        settings(config),
        {
            "trained": True,
            "recipe": models.recipe(config.model),
            "memory": dataclasses.asdict(model.config),
            "distances": distances,
            "after": rows,
        },
    )
    plot(result, Path(f"{config.output}.png"))
    shares = {
        "context": [row["share"] for row in rows.values()],
        "answer's sentence": [row["answer"]["share"] for row in rows.values()],
        "at random": [row["share_random"] for row in rows.values()],
    }
    show("Share of rows", [f"{distance:,}" for distance in distances], shares)


def check(config: Config, model: MPlus) -> None:
    """Raises ValueError if the rows of a chunk could not be identified."""
    memory = model.config
    if not memory.has_retriever or memory.legacy:
        raise ValueError(
            "model must be an M+ with a retriever and a clock of memory tokens, got "
            f"num_retrieved={memory.num_retrieved}, retrieval={memory.retrieval!r}, "
            f"legacy={memory.legacy}"
        )
    if config.chunk % memory.chunk_size:
        raise ValueError(
            f"chunk must be a multiple of the memory's {memory.chunk_size}, so that "
            f"the context has memory tokens of its own, got {config.chunk}"
        )


class Found(NamedTuple):
    """Rows of the context's chunk by layer, and the number of rows in the store.

    Attributes:
        store: in the long-term store.
        retrieved: of those, the ones that a read retrieves.
        answer_store: as `store`, of the sentence with the answer alone.
        answer_retrieved: as `retrieved`, likewise.
        held: rows in the store.
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
    """Places of the rows that were written in a span of the clock.

    Args:
        graph: of `nnx.split`, as `params`.
        params: the model's.
        state: the memory.
        prompt: the question, all of which selects the retrieved rows.
        span: clock before and after the counted text was written.
        answers: of its tokens, first of the answer's sentence and first after it.
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
        "facts": len(store),
        **_shares(store, retrieved, random),
        "answer": _shares(answer_store, answer_retrieved, random),
    }


def _shares(store, retrieved, random) -> dict[str, Any]:
    """Retrieved share, and that of a random choice; NaN where the store has no rows.

    The error is that of the mean over facts, because layers are not independent.
    """
    total, chance = store.sum(axis=1), (store * random).sum()
    some = total > 0
    return {
        "rows_in_store": float(store.mean()),
        "share": _ratio(retrieved.sum(), store.sum()),
        "share_random": _ratio(chance, store.sum()),
        "standard_error": standard_error(retrieved.sum(axis=1)[some] / total[some]),
        "times_random": _ratio(retrieved.sum(), chance),
        "facts_with_rows": int(some.sum()),
    }


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else math.nan


@figure(*SOURCES)
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws retrieved shares of the rows in the store by distance."""
    rows, distances = list(result["after"].values()), result["distances"]
    answers = [row["answer"] for row in rows]
    title = "Rows of a fact in the long-term store that its question retrieves"
    with drawing(path, title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        lines = (
            ("of the answer's sentence", answers, "share"),
            ("of the fact's context", rows, "share"),
            ("at random", rows, "share_random"),
        )
        for i, (name, found, part) in enumerate(lines):
            errors = None
            if part == "share":
                errors = 1.96 * np.asarray([row["standard_error"] for row in found])
            values = [row[part] for row in found]
            drawn.line(axes, distances, values, name, i, errors=errors)
        axes.set(xlabel="tokens injected since", ylabel="share of the rows")
        axes.set_xticks(distances, [f"{distance:,}" for distance in distances])
        axes.set_ylim(-0.03, 1.05)


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
                "tokens since": thousands(distance),
                "rows of the answer's sentence": number(answer["share"], 2),
                "against chance": times(answer["times_random"]),
                "rows of the fact's context": number(row["share"], 2),
                "context against chance": times(row["times_random"]),
                "chance": number(row["share_random"], 2),
            }
        yield models.recipe_text(result["recipe"])


if __name__ == "__main__":
    main(tyro.cli(Config))
