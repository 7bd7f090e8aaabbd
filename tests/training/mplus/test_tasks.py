"""Training tasks of M+: losses and gradients against the official program's."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.data.mplus_tasks.tasks import Target, TaskBatch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus import read as mplus_reading
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints import tensor_names as mplus_names
from memjax.models.mplus.checkpoints.checkpoint import load_official
from memjax.models.mplus.checkpoints.hf_config import mplus_config_from_hf
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.state import MPlusState
from memjax.training.mplus import tasks as mplus_tasks
from memjax.training.mplus.step import init_task_state, make_task_steps
from tests import tiny

GOLDEN = Path(__file__).parents[2] / "models" / "golden" / "mplus"


@pytest.fixture(name="golden", scope="module")
def _golden():
    return np.load(GOLDEN / "more.npz")


@pytest.fixture(name="official", scope="module")
def _official(golden):
    """The authors' tiny model, and its memory after the four injects of P."""
    described = json.loads((GOLDEN / "config.json").read_text())
    config = mplus_config_from_hf(described)
    config = dataclasses.replace(config, eviction="frequency")
    model = load_official(GOLDEN / "tiny_model.safetensors", described, config)
    state = jax.jit(lambda: model.init_state(1))()
    ages = np.tile(np.arange(32)[::-1], (3, 1)).astype(np.int32)
    state = state._replace(ages=jnp.asarray(ages)[None])
    update = jax.jit(lambda state, delta, drop: model.update(state, delta, drop))
    for i in range(1, 5):
        at = f"P/inject{i:02d}"
        delta = jnp.asarray(golden[f"{at}/delta_memory"])[None]
        dropped = jnp.asarray(golden[f"{at}/dropped_idx"])[None]
        state = update(state, delta, dropped)
        np.testing.assert_array_equal(state.ages[0], golden[f"{at}/memory_ages"])
    return model, state


def task_batch(chunks, tokens):
    """Chunks [n, C] of full length and a target, one row."""
    ids = np.asarray(tokens, np.int32)[None]
    t = ids.shape[1] - 1
    chunks = np.asarray(chunks, np.int32)[None]
    return TaskBatch(
        chunks=chunks,
        lengths=np.full(chunks.shape[:2], chunks.shape[2], np.int32),
        target=Target(ids[:, :-1], ids[:, 1:], np.ones((1, t), np.float32)),
        num_queries=np.full(1, t, np.int32),
        keep=np.ones(1, bool),
    )


def gradients(model, loss):
    """Of a function of the model, by its parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params):
        return loss(nnx.merge(graph, params, rest))

    return jax.jit(jax.value_and_grad(run, has_aux=True))(params)


def by_official_name(model, grads):
    """Gradients under the program's names and in its layout."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    held = nnx.merge(graph, grads, rest)
    return dict(mplus_names.learned_tensors(held.weights))


def memory_of(state, t):
    empty = Target(
        *(np.zeros((1, t), kind) for kind in (np.int32, np.int32, np.float32))
    )
    clock = jnp.zeros(1, jnp.int32)
    return mplus_tasks.TaskMemory(state, mplus_tasks.Cached(empty, clock, clock))


@pytest.mark.slow
def test_two_chunk_gradients_are_the_official_programs(official, golden):
    model, state = official
    ids = golden["F/long/ids"][0]
    given = task_batch(golden["F/long/chunk"], ids)
    loss = functools.partial(
        mplus_tasks.task_loss,
        task="two_chunk",
        memory=memory_of(state, len(ids) - 1),
        batch=given,
        prompt=1,
    )
    (value, (after, _)), grads = gradients(model, loss)
    np.testing.assert_allclose(value, golden["F/long/loss"], rtol=1e-4)
    found = by_official_name(model, grads)
    stem = "F/long/grad/"
    wanted = {k.removeprefix(stem): golden[k] for k in golden if k.startswith(stem)}
    for path, value in wanted.items():
        error = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
        assert error < 1e-4, (path, error)
    assert not {path for path in found if path not in wanted and np.any(found[path])}
    news = np.asarray(after.state.pool[0, :, -8:])
    np.testing.assert_allclose(news, golden["F/long/delta_memory"], atol=1e-4)


@pytest.mark.slow
def test_the_retrievers_loss_and_gradients_are_the_official_programs(official, golden):
    model, state = official
    ids = jnp.asarray(golden["G/read/ids"])
    clock = state.clock
    rows = mplus_tasks.rows_of(state, clock - 16, clock)
    np.testing.assert_array_equal(rows[0][0], golden["G/read/positive"])
    np.testing.assert_array_equal(rows[1][0], ~golden["G/read/positive"])

    def loss(model):
        given = mplus_reading.ReadOptions(prompt_length=ids.shape[1])
        _, _, trace = mplus_reading.read_closed(model.weights, state, ids, given)
        num_queries = jnp.full(1, ids.shape[1], jnp.int32)
        found = mplus_tasks.retriever_losses(
            model, state, trace.hidden, num_queries, *rows
        )
        return found, None

    (value, _), grads = gradients(model, loss)
    np.testing.assert_allclose(value, golden["G/read/loss"], rtol=1e-4)
    stem, found = "G/grad/", by_official_name(model, grads)
    wanted = {k.removeprefix(stem): golden[k] for k in golden if k.startswith(stem)}
    for path, value in wanted.items():
        error = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
        assert error < 1e-4, (path, error)
    others = {path for path in found if path not in wanted}
    assert not any(np.any(found[path]) for path in others)


SIZES = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=64),),
    num_layers=1,
    vocab_size=64,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
MEMORY = MPlusConfig(
    num_memory_tokens=4,
    pool_size=16,
    chunk_size=8,
    num_retrieved=4,
    store_size=32,
    key_dim=4,
    rank=2,
    min_chunk_size=1,
)
PROMPT = 3


def small(retrieved):
    """A model of one layer, with changed adapters and a position vector."""
    config = dataclasses.replace(MEMORY, num_retrieved=retrieved)
    key = jax.random.key(0)
    return tiny.drawn(lambda: add_mplus(LanguageModel(SIZES, key=key), config, key=key))


def small_batch(seed, chunks):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return random.integers(0, 64, shape, dtype=np.int32)

    text = draw(2, 13)
    made = TaskBatch(
        chunks=draw(2, chunks, 8),
        lengths=random.integers(2, 9, (2, chunks), dtype=np.int32),
        target=Target(text[:, :-1], text[:, 1:], np.ones((2, 12), np.float32)),
        num_queries=np.array([2, 9], np.int32),
        keep=np.ones(2, bool),
    )
    return made


def groups(grads):
    """Which parameters have a gradient."""
    return {
        name
        for name, tree in nnx.to_pure_dict(grads).items()
        if any(np.asarray(leaf).any() for leaf in jax.tree.leaves(tree))
    }


class Told:
    """A document in two chunks, read with pool and store, by a memory in use."""

    def __init__(self):
        self.model = small(4)
        graph, params, rest = nnx.split(self.model, nnx.Param, ...)

        def run(params, pool, memory, batch):
            model = nnx.merge(graph, params, rest)
            state = memory.state._replace(pool=pool)
            given = memory._replace(state=state)
            _, (after, losses) = mplus_tasks.task_loss(
                model, "multi_chunk", given, batch, PROMPT
            )
            return (losses.language, losses.retriever), (after, losses)

        jacobian = jax.jit(jax.jacrev(run, argnums=(0, 1), has_aux=True))
        key = jax.random.key(3)
        self.after = jax.jit(lambda: mplus_tasks.first_memory(self.model, 2, 12, key))()
        for seed in range(4):
            self.before, self.batch = self.after, small_batch(seed, 2)
            found = jacobian(params, self.before.state.pool, self.before, self.batch)
            self.by_loss, (self.after, self.losses) = found


@pytest.fixture(name="told", scope="module")
def _told():
    return Told()


@pytest.mark.slow
def test_with_a_store_each_loss_reaches_its_own_parameters(told):
    (language, by_pool), (retrieval, also_by_pool) = told.by_loss
    assert groups(language) == {"read_adapter", "bos"}
    assert groups(retrieval) == {"query", "key", "encoder_query"}
    assert not np.asarray(by_pool).any() and not np.asarray(also_by_pool).any()
    assert int(told.after.state.store.num_valid.min()) > 0


@pytest.mark.slow
def test_rows_of_a_document_are_those_new_in_the_pool(told):
    state, before = told.after.state, told.before.state
    rows = mplus_tasks.rows_of(state, before.clock, state.clock)
    old = np.asarray(before.pool)[:, :, None]
    same = (np.asarray(state.pool)[:, :, :, None] == old).all(-1).any(-1)
    np.testing.assert_array_equal(rows[0], ~same)
    np.testing.assert_array_equal(rows[1], same)
    np.testing.assert_array_equal(told.after.cached.first, before.clock)


def test_rows_of_a_document_are_found_when_the_counter_overflows():
    """Of four rows the last two are of a document that began just before."""
    clock = jnp.asarray(np.array([2**31 + 1]).astype(np.int32))
    ages = jnp.arange(4, dtype=jnp.int32)[::-1][None, None]
    parts: Any = dict.fromkeys(MPlusState._fields)
    parts |= dict(clock=clock, ages=ages, num_valid=jnp.array([4]))
    state = MPlusState(**parts)
    document, others = mplus_tasks.rows_of(state, clock - 2, clock)
    assert document[0, 0].tolist() == [False, False, True, True]
    assert others[0, 0].tolist() == [True, True, False, False]


@pytest.mark.slow
def test_non_finite_memory_alone_is_reset(told):
    transform, key = optax.sgd(0.1), jax.random.key(0)
    steps = make_task_steps(told.model, transform, PROMPT)
    step = jax.jit(steps["two_chunk"])
    first = init_task_state(told.model, transform, 2, 12, key)
    state = first._replace(memory=told.after)
    batch = small_batch(7, 1)._replace(keep=jnp.zeros(2, bool))

    memory = told.after.state
    memory = memory._replace(pool=memory.pool.at[1, 0, 3].set(jnp.nan))
    ruined = state._replace(memory=told.after._replace(state=memory))

    def rows(state):
        return state.memory.state.num_valid.tolist()

    after, metrics = step(ruined, batch)
    assert metrics["finite"] == 1 and rows(after) == [16, 4]
    assert not after.memory.cached.target.mask[1].any()
    whole, _ = step(state, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[0], b[0]),
        after.memory,
        whole.memory,
    )
    # A token that is none makes NaN, and the step is skipped.
    chunks = np.array(batch.chunks)
    chunks[1] = 64
    none = batch._replace(chunks=chunks)
    after, metrics = step(state, none)
    assert metrics["finite"] == 0
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    after, metrics = step(after, batch)
    assert metrics["finite"] == 1 and rows(after) == [16, 4]


@pytest.mark.slow
def test_training_with_memory_on_the_host_is_refused(told):
    config = dataclasses.replace(told.model.config, store_memory="host")
    weights = told.model.weights._replace(config=config)
    with pytest.raises(ValueError, match="store_memory must be 'device' in training"):
        make_task_steps(MPlus(weights), optax.sgd(0.1), PROMPT)


@pytest.mark.slow
def test_immediate_revisit_equals_previous_read(told):
    losses = jax.jit(
        lambda memory, batch: mplus_tasks.task_loss(
            told.model, "revisit", memory, batch, PROMPT
        )
    )
    num_queries = small_batch(9, 0)._replace(num_queries=told.batch.num_queries)
    total, (after, _) = losses(told.after, num_queries)
    expected = told.losses.language + told.losses.retriever
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(told.after), strict=True):
        np.testing.assert_array_equal(a, b)
    # The prompt's tokens, and those that the mask leaves out, do not count.
    mask = np.ones((2, 12), np.float32)
    mask[:, 0], mask[:, 5:] = 0, 0
    cached = told.after.cached
    target = jax.tree.map(np.array, cached.target)._replace(mask=mask)
    given = told.after._replace(cached=cached._replace(target=target))
    marked = jax.tree.map(np.copy, target)
    marked.targets[:, [0, 1, 7]] = 0
    other = told.after._replace(cached=cached._replace(target=marked))
    np.testing.assert_array_equal(
        losses(given, num_queries)[0], losses(other, num_queries)[0]
    )
    scored = jax.tree.map(np.copy, target)
    scored.targets[:, 2] = (scored.targets[:, 2] + 1) % 64
    other = told.after._replace(cached=cached._replace(target=scored))
    assert float(losses(given, num_queries)[0]) != float(losses(other, num_queries)[0])


@pytest.mark.slow
def test_only_the_first_tokens_of_a_target_are_queries(told):
    state, random = told.after.state, np.random.default_rng(5)
    hidden = random.standard_normal((2, 2, 12, 8), np.float32)
    rows = mplus_tasks.rows_of(state, told.before.state.clock, state.clock)

    @jax.jit
    def loss(hidden):
        num_queries = told.batch.num_queries
        return mplus_tasks.retriever_losses(
            told.model, state, hidden, num_queries, *rows
        )

    # Rows ask with 2 and 9 tokens.
    others, counted = hidden.copy(), hidden.copy()
    others[:, 0, 2:] += 1
    others[:, 1, 9:] += 1
    counted[:, 1, 8] += 1
    np.testing.assert_array_equal(loss(hidden), loss(others))
    assert float(loss(hidden)) != float(loss(counted))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "reached"),
    [
        (1, {"write_adapter", "position", "bos", "read_adapter"}),
        (2, {"read_adapter", "bos"}),
    ],
)
def test_without_a_store_only_one_chunk_has_a_gradient(chunks, reached):
    model, batch = small(0), small_batch(0, chunks)
    key = jax.random.key(0)
    memory = jax.jit(lambda: mplus_tasks.first_memory(model, 2, 12, key))()
    loss = functools.partial(
        mplus_tasks.task_loss,
        task="multi_chunk",
        memory=memory,
        batch=batch._replace(keep=np.array([True, False])),
        prompt=PROMPT,
    )
    (_, (after, losses)), grads = gradients(model, loss)
    assert groups(grads) == reached and losses.retriever is None
    np.testing.assert_array_equal(after.state.clock, 4 * chunks)
    # What is kept is kept row by row.
    np.testing.assert_array_equal(after.cached.last, [4 * chunks, 0])
    kept = after.cached.target.tokens
    np.testing.assert_array_equal(kept[0], batch.target.tokens[0])
    assert not np.any(kept[1])


def test_a_document_longer_than_the_pool_is_read_by_what_the_pool_holds():
    model, batch = small(0), jax.tree.map(jnp.asarray, small_batch(0, 5))

    @jax.jit
    def losses():
        memory = mplus_tasks.first_memory(model, 2, 12, jax.random.key(3))
        loss = functools.partial(mplus_tasks.task_loss, model, prompt=PROMPT)
        written, (after, _) = loss("multi_chunk", memory, batch)
        read, _ = loss("full_context", after, batch)
        return written, read

    written, read = losses()
    np.testing.assert_allclose(written, read, rtol=1e-6)
