"""Training tasks of M+: losses and gradients against the official program's."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.data.lessons import Lesson, Target
from memjax.models import mplus_names, mplus_reading
from memjax.models.mplus_checkpoint import load_official
from memjax.models.mplus_hf_config import mplus_config_from_hf
from memjax.training import mplus_tasks

GOLDEN = Path(__file__).parent.parent / "models" / "golden" / "mplus"


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
    state = model.init_state(1)
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


def lesson(chunks, tokens, mask=None):
    """Chunks [n, C] of full length and a target, one row."""
    ids = jnp.asarray(tokens, jnp.int32)[None]
    t = ids.shape[1] - 1
    chunks = jnp.asarray(chunks, jnp.int32)[None]
    return Lesson(
        chunks=chunks,
        lengths=jnp.full(chunks.shape[:2], chunks.shape[2], jnp.int32),
        target=Target(
            ids[:, :-1], ids[:, 1:], jnp.ones((1, t)) if mask is None else mask
        ),
        asks=jnp.full(1, t, jnp.int32),
        keep=jnp.ones(1, bool),
    )


def gradients(model, loss):
    """Of a function of the model, by its parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = lambda params: loss(nnx.merge(graph, params, rest))
    return jax.jit(jax.value_and_grad(run, has_aux=True))(params)


def by_official_name(model, grads):
    """Gradients under the program's names and in its layout."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    held = nnx.merge(graph, grads, rest)
    return dict(mplus_names.learned_tensors(held))


def memory_of(state, t):
    empty = Target(*(jnp.zeros((1, t), kind) for kind in (jnp.int32, jnp.int32, float)))
    clock = jnp.zeros(1, jnp.int32)
    return mplus_tasks.TaskMemory(state, mplus_tasks.Cached(empty, clock, clock))


@pytest.mark.parametrize("name", ["long", "short"])
def test_two_chunk_gradients_are_the_official_programs(official, golden, name):
    model, state = official
    ids = golden[f"F/{name}/ids"][0]
    given = lesson(golden[f"F/{name}/chunk"], ids)
    loss = functools.partial(
        mplus_tasks.task_loss,
        task="two_chunk",
        memory=memory_of(state, len(ids) - 1),
        lesson=given,
        prompt=1,
    )
    (value, (after, _)), grads = gradients(model, loss)
    np.testing.assert_allclose(value, golden[f"F/{name}/loss"], rtol=1e-4)
    found = by_official_name(model, grads)
    stem = f"F/{name}/grad/"
    wanted = {k.removeprefix(stem): golden[k] for k in golden if k.startswith(stem)}
    for path, value in wanted.items():
        error = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
        assert error < 1e-4, (path, error)
    news = np.asarray(after.state.pool[0, :, -8:])
    np.testing.assert_allclose(news, golden[f"F/{name}/delta_memory"], atol=1e-4)


def test_the_retrievers_loss_and_gradients_are_the_official_programs(official, golden):
    model, state = official
    ids = jnp.asarray(golden["G/read/ids"])
    clock = state.clock
    rows = mplus_tasks.rows_of(state, clock - 16, clock)
    np.testing.assert_array_equal(rows[0][0], golden["G/read/positive"])
    np.testing.assert_array_equal(rows[1][0], ~golden["G/read/positive"])

    def loss(model):
        given = mplus_reading.Given(None, False, None, None, 0)
        _, _, trace = mplus_reading.read_closed(model, state, ids, given)
        asks = jnp.full(1, ids.shape[1], jnp.int32)
        found = mplus_tasks.retriever_losses(model, state, trace.hidden, asks, *rows)
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
