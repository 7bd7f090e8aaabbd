"""The retriever made by similarity, and its bank."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.data.mplus_tasks.tasks import Target, TaskBatch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus import retriever
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.training.mplus import retriever_fit
from tests import tiny

L, D, K, C, T, B, V = 2, 8, 2, 4, 6, 2, 17
BACKBONE = ModelConfig(
    mechanisms=(AttentionConfig(D, 2, 1, 4, capacity=64),),
    num_layers=L,
    vocab_size=V,
    model_dim=D,
    hidden_dim=12,
    dtype="float32",
)
MEMORY = MPlusConfig(
    num_memory_tokens=K,
    pool_size=6,
    chunk_size=C,
    min_chunk_size=1,
    num_retrieved=2,
    store_size=8,
    key_dim=4,
    rank=2,
)


@functools.cache
def build():
    """A tiny M+; do not change it in place."""
    key = jax.random.key(0)
    return tiny.drawn(
        lambda: add_mplus(LanguageModel(BACKBONE, key=key), MEMORY, key=key)
    )


def task_batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
        yield TaskBatch(
            chunks=rng.integers(0, V, (B, 2, C)).astype(np.int32),
            lengths=np.array([[4, 2], [3, 3]], np.int32),
            target=Target(tokens[:, :-1], tokens[:, 1:], np.ones((B, T), np.float32)),
            num_queries=np.array([2, 5], np.int32),
            keep=np.zeros(B, bool),
        )


@functools.cache
def bank_of_six():
    """Three batches of two documents."""
    return collect(build())


def new_retriever(width, key_dim, seed):
    draw = jax.jit(retriever.init_retriever, static_argnums=(0, 1, 2))
    return draw(L, width, key_dim, jax.random.key(seed))


def collect(model, count=3, asking=4, rows=3):
    return retriever_fit.collect(
        model, task_batches(count), asking, rows, jax.random.key(2)
    )


@pytest.mark.slow
def test_bank_equals_retriever_inputs():
    model = build()
    bank = jax.tree.map(np.asarray, bank_of_six())
    chex.assert_shape(bank.asking, (6, L, 4, D))
    chex.assert_shape(bank.rows, (6, L, 3, D))
    assert bank.query_mask.tolist() == [[True, True, False, False], [True] * 4] * 3
    # The second document by hand: its chunks one by one, then the target's beginning.
    batch = next(iter(task_batches(1)))
    state = model.init_state(1)
    for chunk, length in zip(batch.chunks[1], batch.lengths[1], strict=True):
        new = tiny.method(model, "compress", state, jnp.asarray(chunk[None, :length]))
        state = tiny.method(model, "update", state, new)
    prompt = jnp.asarray(batch.target.tokens[1:, :4])
    _, trace = tiny.method(model, "trace_read", state, prompt)
    state, trace = jax.tree.map(np.asarray, (state, trace))
    normed = jax.jit(model.weights.normed, static_argnums=0)
    for layer in range(L):
        expected = normed(layer, trace.hidden[layer][0])
        np.testing.assert_allclose(
            bank.asking[1, layer].astype(np.float32), expected, rtol=1e-2, atol=1e-2
        )
        made = normed(layer, state.pool[0, layer, -2 * K :])
        for row in bank.rows[1, layer].astype(np.float32):
            assert np.abs(made - row[None]).max(axis=1).min() < 1e-2


WIDTH, AXES = 24, 7


def crowd(documents=8):
    """Documents with a direction each, in a stream with large axes and large means."""
    rng = np.random.default_rng(0)
    own = rng.normal(size=(documents, L, 1, WIDTH))

    def seen(n):
        return own + 0.4 * rng.normal(size=(documents, L, n, WIDTH))

    stretched = np.exp(rng.normal(size=WIDTH))
    means = 5 * rng.normal(size=(2, WIDTH)) * stretched
    asking, rows = (
        jnp.asarray(seen(n) * stretched + mean, jnp.bfloat16)
        for n, mean in zip((5, 6), means, strict=True)
    )
    query_mask = np.arange(5)[None] < rng.integers(1, 6, documents)[:, None]
    return retriever_fit.Bank(asking, jnp.asarray(query_mask), rows)


@jax.jit
def probabilities(params, bank):
    """Of all rows for each document's queries, by layers."""
    n, _, rows, _ = bank.rows.shape
    found = []
    for layer in range(L):
        keys = retriever.project(params[1], layer, bank.rows[:, layer])
        keys = jnp.broadcast_to(keys.reshape(1, n * rows, -1), (n, n * rows, AXES + 1))
        queries = retriever.project(params[0], layer, bank.asking[:, layer])
        found.append(retriever.probabilities(queries, keys, bank.query_mask))
    return found


def found_of_own(params, bank):
    """Share of a document's rows among the best of all, which are as many."""
    n, _, rows, _ = bank.rows.shape
    shares = []
    for p in map(np.asarray, probabilities(tuple(params), bank)):
        best = np.argsort(-p, axis=1)[:, :rows]
        shares.append((best // rows == np.arange(n)[:, None]).mean())
    return np.mean(shares)


@pytest.mark.slow
def test_similarity_finds_rows_like_the_queries():
    bank = crowd()
    params = retriever_fit.similarity(bank, AXES + 1)
    assert found_of_own(params, bank) > 0.6
    drawn = [new_retriever(WIDTH, AXES + 1, seed) for seed in range(2)]
    assert found_of_own(drawn, bank) < 0.25


@pytest.mark.slow
def test_similarity_is_a_whitened_product_above_a_threshold():
    bank = crowd()
    query, key = retriever_fit.similarity(bank, AXES + 1)
    bank = jax.tree.map(np.asarray, bank)
    asking = np.asarray(bank.asking[:, 1][bank.query_mask], np.float64)
    rows = np.asarray(bank.rows[:, 1], np.float64).reshape(-1, WIDTH)
    spread = (np.cov(asking.T) + np.cov(rows.T)) / 2
    values, vectors = np.linalg.eigh(spread)
    whiten = vectors[:, -AXES:] * np.sqrt(32 / AXES / values[-AXES:])
    means = np.stack([asking.mean(axis=0), rows.mean(axis=0)])
    away = np.eye(WIDTH) - np.linalg.pinv(means) @ means
    last = [
        x @ mean / (mean @ mean) for x, mean in zip((asking, rows), means, strict=True)
    ]
    expected = (asking @ away @ whiten) @ (rows @ away @ whiten).T
    expected -= 8 * last[0][:, None] * last[1][None]
    project = jax.jit(retriever.project, static_argnums=1)
    queries, keys = (
        np.asarray(project(part, 1, jnp.asarray(x, jnp.float32)))
        for part, x in ((query, asking), (key, rows))
    )
    np.testing.assert_allclose(queries @ keys.T, expected, rtol=1e-3, atol=0.02)


@pytest.mark.parametrize(("key_dim", "message"), [(1, "at least 2, got 1"), (25, "25")])
def test_more_axes_than_vectors_span_are_refused(key_dim, message):
    with pytest.raises(ValueError, match=f"key_dim.*{message}"):
        retriever_fit.similarity(crowd(), key_dim)


@pytest.mark.parametrize("asking", [0, 1])
def test_bank_with_few_queries_is_refused(asking):
    bank = crowd()
    query_mask = jnp.zeros_like(bank.query_mask).at[0, :asking].set(True)
    with pytest.raises(ValueError, match=f"at least 2 query tokens, got {asking}"):
        retriever_fit.similarity(bank._replace(query_mask=query_mask), AXES + 1)


@pytest.mark.parametrize("rows", [5, 0])
def test_more_rows_than_a_document_has_are_refused(rows):
    with pytest.raises(ValueError, match=f"rows.*{rows}"):
        collect(build(), rows=rows)
