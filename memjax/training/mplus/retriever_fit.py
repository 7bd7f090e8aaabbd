"""Initialisation of M+'s retriever from collected hidden states.

`similarity` constructs a retriever for rows similar to the queries, without a loss.

Shapes: n documents, L layers, Q query tokens, R rows of a document, D model.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from memjax.checks import check_sizes
from memjax.data.mplus_tasks.tasks import TaskBatch
from memjax.models.mplus import read as mplus_reading
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.retriever import Retriever
from memjax.training.mplus.tasks import write

#: Constants of `similarity`: the mean of |f|^2, and the threshold of similarity. The
#: result is nearly the same for 8 to 32 and 3 to 16.
SCALE, THRESHOLD = 32.0, 8.0


class Bank(NamedTuple):
    """The retriever's inputs for some documents, in bfloat16.

    Attributes:
        asking: normed hidden states of the tokens that read the document's memory.
        query_mask: the queries among them, the first few.
        rows: normed memory tokens of the document.
    """

    asking: Float[Array, "n L Q D"]
    query_mask: Bool[Array, "n Q"]
    rows: Float[Array, "n L R D"]


def collect(
    model: MPlus,
    batches: Iterable[TaskBatch],
    asking: int,
    rows: int,
    key: PRNGKeyArray,
) -> Bank:
    """Writes each document into an empty memory, and reads its target.

    Args:
        model: with a retriever.
        batches: with as many chunks each.
        asking: Q, how many of a target's first tokens are kept.
        rows: R, drawn from the document's memory tokens.
        key: of the draws.

    Raises:
        ValueError: if a batch makes fewer rows, or more than the pool holds.
    """
    check_sizes(asking=asking, rows=rows)
    parts, graph_params = [], nnx.split(model)
    for i, batch in enumerate(batches):
        made = batch.chunks.shape[1] * model.config.num_memory_tokens
        if not rows <= made <= model.config.pool_size:
            raise ValueError(
                f"batches must make rows={rows} to pool_size={model.config.pool_size} "
                f"memory tokens each, got {made}"
            )
        drawn = jax.random.fold_in(key, i)
        parts.append(_collect(*graph_params, batch, drawn, made, asking, rows))
    return Bank(*(jnp.concatenate(x) for x in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _collect(graph, params, batch, key, made, asking, rows):
    model = nnx.merge(graph, params)
    _, state = write(model, model.init_state(batch.chunks.shape[0]), batch)
    given = ReadOptions()
    tokens = batch.target.tokens[:, :asking]
    _, _, trace = mplus_reading.read_closed(model.weights, state, tokens, given)
    chosen = jax.random.choice(key, made, (rows,), replace=False)
    # The newest rows are the document's: the memory was empty before it.
    pool = state.pool[:, :, state.pool.shape[2] - made + chosen]

    def normed(x):
        rows = [model.weights.normed(i, x[:, i]) for i in range(model.layers)]
        # Hundreds of documents are stored: half the memory of float32.
        return jnp.stack(rows, axis=1).astype(jnp.bfloat16)

    times = jnp.arange(asking, dtype=jnp.int32)[None]
    return Bank(
        asking=normed(jnp.moveaxis(trace.hidden[:-1], 0, 1)),
        query_mask=times < batch.num_queries[:, None],
        rows=normed(pool),
    )


def start_by_similarity(model: MPlus, bank: Bank) -> MPlus:
    """The model with the query and key of `similarity`.

    Raises:
        ValueError: as `similarity` does, for the model's `key_dim`.
    """
    query, key = similarity(bank, model.config.key_dim)
    return model.replace(query=query, key=key)


def similarity(bank: Bank, key_dim: int) -> tuple[Retriever, Retriever]:
    """Query and key with high p for rows similar to the query tokens.

    f_q(h) · f_k(m) = (A h) · (A m) - threshold, with A the first d - 1 principal axes,
    whitened and orthogonal to the means: a few axes of a backbone's residual stream are
    hundreds of times larger than others, and nearly constant over tokens. As silu(x) -
    silu(-x) = x, the retriever's two matrices can be linear.

    Args:
        bank: of some thirty documents or more.
        key_dim: d, at least 2.

    Raises:
        ValueError: if key_dim is below 2, the bank's vectors span fewer axes, or it
            has fewer than two query tokens.
    """
    if key_dim < 2:
        raise ValueError(f"key_dim must be at least 2, got {key_dim}")
    n, layers, rows, width = bank.rows.shape
    if min(n * rows, width) < key_dim:
        raise ValueError(
            f"bank must have at least key_dim={key_dim} rows, of as many features, got "
            f"{n * rows} of {width}"
        )
    if (query_mask := int(bank.query_mask.sum())) < 2:
        raise ValueError(f"bank must have at least 2 query tokens, got {query_mask}")
    made = []
    for layer in range(layers):
        asking = bank.asking[:, layer][bank.query_mask].astype(jnp.float32)
        stored = bank.rows[:, layer].reshape(-1, width).astype(jnp.float32)
        made.append(_similar(asking, stored, key_dim - 1))
    query, key = (_linear(jnp.stack(matrices)) for matrices in zip(*made, strict=True))
    return query, key


@functools.partial(jax.jit, static_argnums=2)
def _similar(asking, stored, axes):
    """A of queries and of keys; the product of their last columns is -THRESHOLD."""
    means = [x.mean(axis=0) for x in (asking, stored)]
    spread = sum(jnp.cov(x, rowvar=False) for x in (asking, stored)) / 2
    values, vectors = jnp.linalg.eigh(spread)
    # Whitening axes without spread would amplify noise.
    values = jnp.maximum(values[-axes:], 1e-6 * values[-1])
    a = vectors[:, -axes:] * jnp.sqrt(SCALE / axes / values)[None]
    basis, _ = jnp.linalg.qr(jnp.stack(means, axis=1))
    # The means are large in all tokens and would dominate every product.
    a -= basis @ (basis.T @ a)
    # A vector's part along its mean is about that of all others.
    along = [mean / (mean @ mean) for mean in means]
    last = (THRESHOLD * along[0], -along[1])
    return [jnp.concatenate([a, x[:, None]], axis=1) for x in last]


@jax.jit
def _linear(matrices):
    """f(x) = A x."""
    layers, _, key_dim = matrices.shape
    # silu(x) - silu(-x) = x: two copies of opposite sign make the nonlinearity cancel.
    up = jnp.concatenate([jnp.eye(key_dim), -jnp.eye(key_dim)])
    return Retriever(
        down=jnp.concatenate([matrices, -matrices], axis=2),
        up=jnp.broadcast_to(up, (layers, *up.shape)),
    )
