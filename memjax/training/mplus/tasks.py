"""M+'s training tasks: the loss of each, and the memory after it.

    full_context   reads a target with the memory and writes nothing
    two_chunk      reads the K memory tokens of one chunk; gradients flow into them
    multi_chunk    writes chunks without a gradient, then reads with the whole memory
    revisit        reads the target of an earlier document with today's memory

The memory continues from step to step and from document to document, without
gradients. Without a store (MemoryLLM; stages 1 and 2) a document's memory tokens are
read together with random rows of the pool. With a store, every read of the pool also
trains the retriever, on detached inputs, to tell the document's rows from others.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, sections 3.2.3 and D; details that
they leave open follow the published program.

Shapes: B batch, n chunks, C longest chunk, T tokens of a target, L layers, N rows of
the pool, K memory tokens of a chunk, D model.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Scalar

from memjax import mechanisms
from memjax.data.mplus_tasks.tasks import Target, Task, TaskBatch
from memjax.models.loss import loss_sum
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import read as mplus_reading
from memjax.models.mplus import retriever
from memjax.models.mplus import write as mplus_writing
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.state import MPlusState


class Cached(NamedTuple):
    """The target of an earlier document, and the time of its memory.

    Attributes:
        target: to be read again; masked while there is none.
        first: the clock before the document's first chunk.
        last: the clock after its last chunk; its rows are born in (first, last].
    """

    target: Target
    first: Int[Array, " B"]
    last: Int[Array, " B"]


class TaskMemory(NamedTuple):
    """The memory that continues from step to step; part of a checkpoint."""

    state: MPlusState
    cached: Cached


class Losses(NamedTuple):
    """The losses of a step.

    Attributes:
        language: mean nats per scored token.
        retriever: sum over both kinds of queries; None where the task has none.
    """

    language: Scalar
    retriever: Scalar | None

    @property
    def total(self) -> Scalar:
        """Their sum, which is minimised."""
        return (
            self.language
            if self.retriever is None
            else (self.language + self.retriever)
        )


def first_memory(
    model: MPlus, batch: int, target: int, key: PRNGKeyArray
) -> TaskMemory:
    """The memory before the first step."""
    tokens = jnp.zeros((batch, target), jnp.int32)
    # Three buffers: a donated state must not hold one of them twice.
    empty = Target(tokens, tokens + 0, jnp.zeros((batch, target), jnp.float32))
    clock = jnp.zeros(batch, jnp.int32)
    state = model.init_state(batch, key=key)
    return TaskMemory(state, Cached(empty, clock, clock + 0))


def healed(model: MPlus, memory: TaskMemory, bad: Bool[Array, " B"]) -> TaskMemory:
    """The memory with the batch elements in `bad` reset.

    They keep the key of their random numbers, which would repeat.
    """
    # The rows that a kept target is of are gone too.
    cached = jax.tree.map(jnp.zeros_like, memory.cached)
    return TaskMemory(
        model.reset(memory.state, bad),
        mechanisms.replace_rows(memory.cached, cached, bad),
    )


def task_loss(
    model: MPlus, task: Task, memory: TaskMemory, batch: TaskBatch, prompt: int
) -> tuple[Scalar, tuple[TaskMemory, Losses]]:
    """The loss of one step, and the memory after it.

    Args:
        model: its gradient is that of the loss by the model's parameters.
        task: which loss.
        memory: of the steps before, without open chunks; gets no gradient.
        batch: with one chunk for "two_chunk", any number for "multi_chunk"; the other
            tasks write none.
        prompt: number of first tokens of the target, in [1, T], that choose rows of the
            store and are not scored. With `retrieval_source` "all", as in the program,
            and with retrieval "attention", every token chooses and is scored.
    """
    # Backpropagation ends at the step: the memory goes on for thousands of them.
    memory = jax.lax.stop_gradient(memory)
    read = functools.partial(_read_memory, model, prompt=prompt)
    state, cached = memory

    def document(after):
        return Cached(batch.target, memory.state.clock, after.clock)

    match task:
        case "full_context":
            losses = Losses(read(state, batch.target)[0], None)
        case "revisit":
            losses = _read_rows_of(model, read, memory, batch.num_queries)
        case "two_chunk":
            news, state = write(model, state, batch)
            # Read alone, so that the loss depends on what the chunk's own memory tokens
            # hold.
            given = mplus_reading.ReadOptions(new=news[0])
            language, _ = _language(model, memory.state, batch.target, given)
            losses = Losses(language, None)
        case "multi_chunk":
            # As in the program, one chunk keeps its gradient where there is no store.
            live = batch.chunks.shape[1] == 1 and not model.config.num_retrieved
            news, state = write(model if live else _detached(model), state, batch)
            if model.config.num_retrieved:
                now = TaskMemory(state, document(state))
                losses = _read_rows_of(model, read, now, batch.num_queries)
            elif news.shape[0] * news.shape[3] >= model.config.pool_size:
                # The pool holds what it did not drop of a document longer than itself.
                losses = Losses(read(state, batch.target)[0], None)
            else:
                new = jnp.concatenate(list(news), axis=2)
                given = mplus_reading.ReadOptions(new=new, beside_pool=True)
                language, _ = _language(model, memory.state, batch.target, given)
                losses = Losses(language, None)
    if task in ("two_chunk", "multi_chunk"):
        # Some targets are kept to be revisited once the memory has moved on.
        def keep(new, old):
            return jnp.where(batch.keep.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        cached = jax.tree.map(keep, document(state), cached)
    after = jax.lax.stop_gradient(TaskMemory(state, cached))
    return losses.total, (after, losses)


def write(
    model: MPlus, state: MPlusState, batch: TaskBatch
) -> tuple[Float[Array, "n B L K D"], MPlusState]:
    """Compresses and stores the chunks of a batch; also their memory tokens."""

    def step(state, chunk):
        tokens, lengths = chunk
        new = mplus_writing.compress(model.weights, state, tokens, lengths, None)
        # Gradients flow through the new tokens that are read, and not through the pool.
        return model.update(state, jax.lax.stop_gradient(new)), new

    chunks = (jnp.moveaxis(batch.chunks, 1, 0), jnp.moveaxis(batch.lengths, 1, 0))
    # One chunk needs no loop.
    if batch.chunks.shape[1] == 1:
        state, new = step(state, jax.tree.map(lambda x: x[0], chunks))
        return new[None], state
    state, news = jax.lax.scan(step, state, chunks)
    return news, state


def rows_of(
    state: MPlusState, first: Int[Array, " B"], last: Int[Array, " B"]
) -> tuple[Bool[Array, "B L N"], Bool[Array, "B L N"]]:
    """The pool's rows born in (first, last], and all its other rows."""
    # By ages, because the clock runs around.
    oldest, youngest = state.clock - first, state.clock - last
    after = (state.ages < oldest[:, None, None]) & (
        state.ages >= youngest[:, None, None]
    )
    n = state.ages.shape[2]
    places = jnp.arange(n, dtype=jnp.int32)[None]
    filled = (places >= n - state.num_valid[:, None])[:, None]
    # Empty rows are neither: the retriever must not learn from zeros.
    return filled & after, filled & ~after


def retriever_losses(
    model: MPlus,
    state: MPlusState,
    hidden: Float[Array, "L1 B T D"],
    num_queries: Int[Array, " B"],
    positive: Bool[Array, "B L N"],
    negative: Bool[Array, "B L N"],
) -> Scalar:
    """The retriever's loss over the pool's rows, for both kinds of queries.

    Queries come from the tokens that read, and from the pool's newest K rows. The
    latter are trained as in the program, which does not use them either.

    `hidden` has the input of each layer at the tokens, and the features; the first
    `num_queries` tokens are queries. `positive` are rows of the document, `negative`
    others.
    """
    times = jnp.arange(hidden.shape[2], dtype=jnp.int32)[None]
    query_mask = times < num_queries[:, None]
    weights = model.weights
    assert weights.encoder_query is not None
    of_tokens, of_memory = [], []
    for layer in range(model.layers):
        rows = short_term_pool.of_layer(state.pool, layer)
        pool = weights.normed(layer, rows)
        keys = weights.retriever_keys(layer, rows)
        tokens = weights.retriever_queries(layer, hidden[layer])
        of_tokens.append(retriever.probabilities(tokens, keys, query_mask))
        last = retriever.project(
            weights.encoder_query, layer, pool[:, -model.config.num_memory_tokens :]
        )
        of_memory.append(retriever.probabilities(last, keys))
    both = (jnp.stack(p, axis=1) for p in (of_tokens, of_memory))
    loss = [retriever.retriever_loss(p, positive, negative) for p in both]
    return loss[0] + loss[1]


def _read_rows_of(model, read, memory, num_queries):
    """Reads the cached target; the retriever learns to find its document's rows."""
    state, cached = memory
    language, hidden = read(state, cached.target)
    if not model.config.has_retriever:
        return Losses(language, None)
    rows = rows_of(state, cached.first, cached.last)
    return Losses(language, retriever_losses(model, state, hidden, num_queries, *rows))


def _read_memory(model, state, target, *, prompt):
    """Reads a target with pool and store; its loss, and the layers' inputs."""
    config = model.config
    seen_before = config.has_retriever and config.retrieval_source == "prefix"
    # Every token chooses, or each for itself: then all of them are scored.
    if not seen_before:
        prompt = None
    else:
        # Target i is token i + 1.
        times = jnp.arange(target.mask.shape[1], dtype=jnp.int32)
        scored = (times >= prompt - 1).astype(target.mask.dtype)
        target = target._replace(mask=target.mask * scored[None])
    given = mplus_reading.ReadOptions(prompt_length=prompt)
    return _language(model, state, target, given)


def _language(model, state, target, given):
    """Mean loss of the scored tokens, and the layers' inputs."""
    _, features, trace = mplus_reading.read_closed(
        model.weights, state, target.tokens, given
    )
    nll = loss_sum(
        model.logits, features, target.targets, target.mask, model.vocab_size
    )
    # A fully masked target has loss 0, not 0 / 0.
    return nll / jnp.maximum(target.mask.sum(), 1.0), trace.hidden


def _detached(model: MPlus) -> MPlus:
    graph, variables = nnx.split(model)
    return nnx.merge(graph, jax.lax.stop_gradient(variables))
