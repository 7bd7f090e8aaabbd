"""M+-Attn: every token and head takes rows of the store by its attention scores."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.data.mplus_tasks.tasks import Target, TaskBatch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig, Sampling
from memjax.models.checkpoints.memory_state import load_memory, save_memory
from memjax.models.mplus import attention_retrieval
from memjax.models.mplus.attention_retrieval import AttentionRetriever
from memjax.models.mplus.build import add_memoryllm, add_mplus
from memjax.models.mplus.checkpoints.checkpoint import (
    load_mplus,
    load_official,
)
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import LayerStore, Store
from memjax.nnx import as_arrays
from memjax.training.mplus import tasks as mplus_tasks
from tests import tiny

B, V, D, L, G, HEADS, H = 2, 19, 8, 2, 2, 4, 4
K, N, C, R, M = 2, 4, 3, 3, 8
# The pool is full after two chunks; four more fill the store.
T = 6 * C + 2
SIZES = ModelConfig(
    mechanisms=(AttentionConfig(D, HEADS, G, H, capacity=64, rope_theta=100.0),),
    num_layers=L,
    vocab_size=V,
    model_dim=D,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)
CONFIG = MPlusConfig(
    num_memory_tokens=K,
    pool_size=N,
    chunk_size=C,
    min_chunk_size=1,
    num_retrieved=R,
    store_size=M,
    retrieval="attention",
    rank=2,
    alpha=4.0,
)
# Calls of T tokens go on from the state after every token of the first T - C.
LONG = np.random.default_rng(1).integers(0, V, (B, 2 * T - C), np.int32)
TOKENS = LONG[:, :T]

near = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)


def build(make=add_mplus, num_layers=L, **changes):
    config, key = dataclasses.replace(CONFIG, **changes), jax.random.key(0)
    sizes = dataclasses.replace(SIZES, num_layers=num_layers)
    return tiny.drawn(lambda: make(LanguageModel(sizes, key=key), config, key=key))


@functools.cache
def shared():
    """The model of most tests; none changes it."""
    return build()


def verb(name, state, *args, model=None):
    return tiny.method(model or shared(), name, state, *args)


def close(actual, expected, tolerance=2e-5):
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


# One layer against numpy.


def turned(x, position):
    """RoPE by its definition: channels i and i + H/2 are a complex number."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * position * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def best(scores, born):
    """Places of the R best of a token and head, oldest first; of equals the first."""
    places = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:R]
    return sorted(places, key=lambda i: (born[i], i))


@pytest.mark.parametrize("at_once", [2**26, 400])
def test_attention_to_top_rows_by_token_and_head(at_once, monkeypatch):
    """Small whole numbers, so that many scores and births are alike."""
    monkeypatch.setattr(attention_retrieval, "MAX_SCORES", at_once)
    random, t, slots, held = np.random.default_rng(0), 5, 7, [M, 2]

    def whole(*shape):
        return random.integers(-2, 3, shape).astype(np.float32)

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    plain, query = whole(B, t, HEADS, H), normal(B, t, HEADS, H)
    key, value = normal(B, slots, G, H), normal(B, slots, G, H)
    keys, values, born = whole(B, M, G, H), normal(B, M, G, H), whole(B, M)
    # What is in empty places is nobody's.
    keys[1, 2:], values[1, 2:] = 9, np.nan

    def flat(x):
        return jnp.asarray(x.reshape(B, M, -1))

    layer = LayerStore(flat(values), flat(keys), jnp.asarray(born, jnp.int32))
    none = jnp.zeros(B, jnp.int32)
    store = Store((layer,), jnp.zeros((B, M)), jnp.array(held, jnp.int32), none)
    attention_retriever = AttentionRetriever(SIZES, R, store)
    visible, before = random.random((B, slots)) < 0.6, np.array([2, 0], np.int32)
    for row in range(B):
        visible[row, before[row] : before[row] + t] = True
    attend = jax.jit(
        lambda *args: (
            attention_retriever.attend(0, *args),
            attention_retriever.chosen.pop(),
        )
    )
    given = map(jnp.asarray, (plain, query, key, value, before, visible))
    y, chosen = attend(*given)
    assert chosen.shape == (B, t, HEADS, R)
    for row, token, head in np.ndindex(B, t, HEADS):
        group, count = head // (HEADS // G), held[row]
        scores = keys[row, :count, group] @ plain[row, token, head]
        expected = best(scores, born[row])
        place = chosen[row, token, head]
        assert place[R - len(expected) :].tolist() == expected
        found = [turned(keys[row, j, group], i + 1) for i, j in enumerate(expected)]
        sees = visible[row] & (np.arange(slots) <= before[row] + token)
        all_keys = np.concatenate([found, key[row, sees, group]])
        logits = all_keys @ query[row, token, head] / np.sqrt(H)
        weights = np.exp(logits) / np.exp(logits).sum()
        stored = values[row, expected, group]
        all_values = np.concatenate([stored, value[row, sees, group]])
        near(y[row, token, head], weights @ all_values)


# The whole model.


def weights(layer, name, adapter):
    """A matrix [D, heads, H] of a layer, with its adapter's change."""
    block = shared().backbone.blocks[layer]
    change = adapter[layer]["mechanism"][name]
    scale = CONFIG.alpha / CONFIG.rank
    product = np.tensordot(change.down, change.up, 1)
    return np.asarray(getattr(block.parameters().mechanism, name)) + scale * product


def seen_by(layer, name, x):
    """What the layer that reads makes of x: queries, keys or values [..., heads, H]."""
    x = np.asarray(x, np.float64)
    norm = np.asarray(shared().backbone.blocks[layer].mechanism_norm.get_value())
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + SIZES.norm_epsilon) * norm
    return np.tensordot(x, weights(layer, name, as_arrays(shared().read_adapter)), 1)


@pytest.fixture(name="told", scope="module")
def _told():
    """A memory whose store is full, and one before its last update."""
    # In calls of one length, which one program reads.
    states = [shared().init_state(B)]
    for piece in np.split(TOKENS, 4, axis=1):
        states.append(verb("inject", states[-1], piece))
    return states[-2], states[-1]


@pytest.mark.slow
def test_dropped_rows_are_stored_as_keys_and_values(told):
    before, _ = told
    assert before.store.num_valid.tolist() == [6, 6]
    new = np.random.default_rng(5).standard_normal((B, L, K, D)).astype(np.float32)
    dropped = jnp.array([[[0, 2], [1, 3]], [[2, 3], [0, 1]]], jnp.int32)
    after = verb("update", before, new, dropped)
    assert after.store.num_valid.tolist() == [M, M]
    before, after = (
        jax.tree.map(np.asarray, x._replace(key=None)) for x in (before, after)
    )
    for layer, row, i in np.ndindex(L, B, K):
        at = int(dropped[row, layer, i])
        vector, store = before.pool[row, layer, at], after.store.layers[layer]
        near(store.keys[row, 6 + i], seen_by(layer, "key", vector).ravel())
        near(store.rows[row, 6 + i], seen_by(layer, "value", vector).ravel())
        # The clock has gone on by K, and so have ages.
        age = int(before.ages[row, layer, at])
        assert store.born[row, 6 + i] == before.clock[row] - age


@pytest.mark.slow
def test_read_retrieves_top_rows(told):
    _, state = told
    assert state.store.num_valid.tolist() == [M, M] and state.length.tolist() == [2, 2]
    question = TOKENS[:, 4:9]
    _, trace = verb("trace_read", state, question)
    assert trace.scores is None and trace.chosen.shape == (L, B, 5, HEADS, R)
    different = set()
    state = jax.tree.map(np.asarray, state._replace(key=None))
    for layer, row in np.ndindex(L, B):
        store = jax.tree.map(lambda x, row=row: x[row], state.store.layers[layer])
        keys = np.asarray(store.keys).reshape(M, G, H)
        queries = seen_by(layer, "query", trace.hidden[layer, row])
        for token, head in np.ndindex(5, HEADS):
            scores = keys[:, head // (HEADS // G)] @ queries[token, head]
            expected = best(scores, np.asarray(store.born))
            assert trace.chosen[layer, row, token, head].tolist() == expected
            different.add((layer, row, *expected))
    # Tokens and heads do not agree.
    assert len(different) > 10 * L * B / 2


@pytest.mark.slow
def test_small_store_equals_learned_retrieval():
    """With no choice left: the same rows, order, positions and attention."""
    by_attention = build(num_layers=1, num_retrieved=M)
    learned = build(num_layers=1, num_retrieved=M, retrieval="learned", key_dim=3)
    question, logits = TOKENS[:, :5], []
    for model in (by_attention, learned):
        state = model.init_state(B)
        for start in (0, 3 * C):
            piece = TOKENS[:, start : start + 3 * C]
            state = verb("inject", state, piece, model=model)
            logits.append(verb("read", state, question, model=model)[1])
        assert state.store.num_valid.tolist() == [M, M]
    close(logits[:2], logits[2:])
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


# The law of models.


@functools.cache
def one_layer():
    """Layers are told apart above."""
    return build(num_layers=1)


def call(state, tokens):
    return verb("__call__", state, tokens, model=one_layer())


@pytest.fixture(name="steps", scope="module")
def _steps():
    states, logits = [one_layer().init_state(B)], []
    for t in range(LONG.shape[1]):
        state, y = call(states[-1], LONG[:, t : t + 1])
        states.append(state)
        logits.append(y)
    return states, np.concatenate(logits, axis=1)


@pytest.mark.slow
def test_call_equals_single_tokens(steps):
    states, logits = steps
    for t in range(T - C + 1):
        result = call(states[t], LONG[:, t : t + T])
        close(result, (states[t + T], logits[:, t : t + T]))


@pytest.mark.slow
def test_call_equals_read(steps):
    """No token chooses for another, so that it is the same who else num_queries."""
    states, logits = steps
    assert states[6 * C].length.tolist() == [0] * B
    # A call would write the second chunk's memory before the third.
    text = LONG[:, 6 * C : 8 * C]
    _, read = verb("read", states[6 * C], text, model=one_layer())
    close(read[:, :C], logits[:, 6 * C : 7 * C])


@pytest.mark.slow
def test_causality_and_dropped_rows(steps):
    states, logits = steps
    for at in (C + 1, T - 3):
        changed = TOKENS.copy()
        changed[:, at] = (changed[:, at] + 1) % V
        _, other = call(states[0], changed)
        near(other[:, :at], logits[:, :at])
        change = np.abs(other - logits[:, :T]).max(axis=-1)
        assert change[:, [at, T - 1]].min() > 1e-5
    # The store alone tells the last tokens something.
    store = states[T - 1].store
    layers = tuple(x._replace(rows=x.rows[:, ::-1]) for x in store.layers)
    moved = states[T - 1]._replace(store=store._replace(layers=layers))
    _, other = call(moved, TOKENS[:, -1:])
    assert np.abs(other - logits[:, T - 1 : T]).max(axis=(1, 2)).min() > 1e-5


@pytest.mark.slow
def test_batch_elements_may_have_different_lengths(steps):
    states, logits = steps
    at = T - C - 1
    state = one_layer().reset(states[at], jnp.array([True, False]))
    tokens = LONG[:, at : at + T]
    after, y = call(state, tokens)
    _, fresh = call(states[0], tokens)
    # Then its pool is full, and drops rows by its own random numbers.
    close(y[0, : 3 * C], fresh[0, : 3 * C])
    close(y[1], logits[1, at : at + T])
    assert after.num_valid.tolist() == [N, N]
    assert after.clock.tolist() == [T // C * K, (at + T) // C * K]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.slow
def test_decode_retrieves_for_each_new_token(steps):
    state, model = steps[0][T], one_layer()
    prompt, count = TOKENS[:, 5:9], 3
    greedy = Sampling(temperature=0.0)
    key = jax.random.key(0)
    answer = model.generate(state, prompt, count, key=key, sampling=greedy)
    text = np.concatenate([prompt, np.asarray(answer)[:, :-1]], axis=1)
    _, logits = verb("read", state, text, model=model)
    np.testing.assert_array_equal(answer, np.argmax(logits, axis=-1)[:, 3:])


# Learning.


@pytest.mark.slow
def test_there_is_no_retriever():
    names = {"backbone", "write_adapter", "read_adapter", "bos", "position"}
    assert {*nnx.to_pure_dict(nnx.state(shared()))} == names
    state = jax.eval_shape(lambda: shared().init_state(B))
    assert state.queries is None
    assert {x.keys.shape for x in state.store.layers} == {(B, M, G * H)}
    assert {x.rows.shape for x in state.store.layers} == {(B, M, G * H)}
    # Nor slots of what it would have found.
    assert state.cache.visible.shape == (B, 1 + N + C)


@pytest.mark.slow
def test_a_step_has_no_retriever_loss_and_scores_every_token(steps):
    model, text = one_layer(), TOKENS[:, :7]
    batch = TaskBatch(
        chunks=TOKENS[:, None, 7 : 7 + C],
        lengths=jnp.full((B, 1), C, jnp.int32),
        target=Target(text[:, :-1], text[:, 1:], jnp.ones((B, 6), jnp.float32)),
        num_queries=jnp.array([2, 4], jnp.int32),
        keep=jnp.ones(B, bool),
    )
    memory = mplus_tasks.first_memory(model, B, 6, jax.random.key(0))
    closed = steps[0][5 * C]._replace(length=jnp.zeros(B, jnp.int32))
    memory = memory._replace(state=closed)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        model = nnx.merge(graph, params, rest)
        return mplus_tasks.task_loss(model, "multi_chunk", memory, batch, 3)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (after, losses)), grads = run(params)
    assert losses.retriever is None and after.state.store.num_valid.tolist() == [M, M]
    _, logits = verb("read", after.state, text[:, :-1], model=model)
    scores = jax.nn.log_softmax(logits)
    near(total, -jnp.take_along_axis(scores, text[:, 1:, None], axis=-1).mean())
    chex.assert_tree_all_finite(grads)
    moved = {
        name
        for name, tree in nnx.to_pure_dict(grads).items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(tree))
    }
    assert moved == {"read_adapter", "bos"}


# Files and bad input.


@pytest.mark.slow
def test_files_record_the_retrieval(told, tmp_path):
    save_memory(tmp_path / "memory", shared(), told[1])
    chex.assert_trees_all_equal(load_memory(tmp_path / "memory", shared()), told[1])
    learned = build(retrieval="learned", key_dim=G * H)
    message = "config.retrieval is 'attention' in the memory and 'learned' in the model"
    with pytest.raises(ValueError, match=message):
        load_memory(tmp_path / "memory", learned)
    message = "retrieval must be 'learned' in a checkpoint of the official"
    with pytest.raises(ValueError, match=message):
        shared().save(tmp_path / "model")
    learned.save(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_official(tmp_path / "model", config=CONFIG)
    # MemoryLLM has no store, and is found in every file.
    plain = build(add_memoryllm)
    plain.save(tmp_path / "plain")
    assert load_mplus(tmp_path / "plain").config == plain.config


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(legacy=True), "legacy must be False with retrieval='attention', got"),
        (
            dict(retrieval_source="all"),
            "retrieval_source must be 'prefix' with .*'all'",
        ),
        (dict(store_memory="host"), "store_memory must be 'device' with .* got 'host'"),
    ],
)
def test_settings_that_do_not_fit_the_retrieval_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


@pytest.mark.slow
def test_options_that_do_not_fit_the_retrieval_are_refused(told):
    tokens, (_, state) = TOKENS[:, :3], told
    with pytest.raises(ValueError, match="prompt_length must be None with .* got 2"):
        shared().read(state, tokens, ReadOptions(prompt_length=2))
    reading = state.cache
    with pytest.raises(ValueError, match="state must be that of the cache .* None"):
        shared().decode(reading, tokens)
    with pytest.raises(ValueError, match="state must be None .*only_new=True, got a"):
        shared().decode(reading, tokens, only_new=True, state=state)
    with pytest.raises(ValueError, match="state must be None .*'learned'"):
        build(retrieval="learned").decode(reading, tokens, state=state)
