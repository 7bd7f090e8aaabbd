"""M+ and MemoryLLM keep the law of models, and their verbs agree with each other."""

import collections
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig, Sampling, generate
from memjax.models.mplus import write
from memjax.models.mplus.build import add_memoryllm, add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions
from tests import tiny

B, V, D, L, K, N, C, R, M = 2, 19, 8, 2, 2, 6, 4, 3, 8
# The pool is full after three chunks; three more put six rows into the store.
T = 6 * C + 3
SIZES = ModelConfig(
    mechanisms=(AttentionConfig(D, 2, 1, 4, capacity=64),),
    num_layers=L,
    vocab_size=V,
    model_dim=D,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)
MEMORY: Any = dict(
    num_memory_tokens=K,
    pool_size=N,
    chunk_size=C,
    min_chunk_size=2,
    num_retrieved=R,
    store_size=M,
)
CONFIG = MPlusConfig(**MEMORY, key_dim=5, rank=2, alpha=4.0)
LEGACY = dataclasses.replace(
    CONFIG, legacy=True, merge_every=1, recalls=2.0, store_size=16
)
# Calls of T tokens go on from the state after every token of the first T - C. Of numpy,
# whose slices compile nothing.
LONG = np.random.default_rng(1).integers(0, V, (B, 2 * T - C), np.int32)
TOKENS = LONG[:, :T]
GREEDY = Sampling(temperature=0.0)
TRACED = collections.Counter()


@functools.cache
def build(kind="mplus", **backbone):
    sizes, key = dataclasses.replace(SIZES, **backbone), jax.random.key(0)
    if kind != "mplus":
        # Layers are told apart in "mplus"; one is half as much to compile.
        sizes = dataclasses.replace(sizes, num_layers=1)
    make = add_memoryllm if kind == "memoryllm" else add_mplus
    config = LEGACY if kind == "legacy" else CONFIG
    model = tiny.drawn(lambda: make(LanguageModel(sizes, key=key), config, key=key))
    graph, params = nnx.split(model)

    def smaller(path, x):
        # Or rounding to bfloat16 would be magnified from layer to layer.
        learned = ("write_adapter", "read_adapter", "position")
        return 0.3 * x if any(n in jax.tree_util.keystr(path) for n in learned) else x

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(smaller, params))


@functools.partial(jax.jit, static_argnums=0)
def _call(graph, params, state, tokens):
    TRACED[graph, tokens.shape] += 1
    return nnx.merge(graph, params)(state, tokens)


def run(model, state, tokens):
    return _call(*nnx.split(model), state, tokens)


def by_steps(model, state, tokens):
    states, logits = [state], []
    for t in range(tokens.shape[1]):
        state, y = run(model, state, tokens[:, t : t + 1])
        states.append(state)
        logits.append(y)
    return states, np.concatenate(logits, axis=1)


@functools.cache
def stepped(kind):
    """A model, and its states and logits token by token."""
    model = build(kind)
    return model, *by_steps(model, model.init_state(B), LONG)


def change(tokens, *at):
    """Another token there."""
    tokens = tokens.copy()
    tokens[at] = (tokens[at] + 1) % V
    return tokens


def close(actual, expected, tolerance=2e-5):
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(
    params=[
        "mplus",
        pytest.param("memoryllm", marks=pytest.mark.slow),
    ],
    name="case",
    scope="module",
)
def _case(request):
    return stepped(request.param)


def test_single_tokens_have_finite_logits(case):
    _, states, logits = case
    assert logits.shape == (*LONG.shape, V) and np.isfinite(logits).all()
    assert states[T].length.tolist() == [T % C] * B


def test_call_equals_single_tokens(case):
    model, states, logits = case
    close(run(model, states[0], TOKENS), (states[T], logits[:, :T]))


@pytest.mark.slow
def test_call_continues_from_every_state():
    """So that any split of a text gives what its tokens give."""
    model, states, logits = stepped("mplus")
    for t in range(T - C + 1):
        result = run(model, states[t], LONG[:, t : t + T])
        close(result, (states[t + T], logits[:, t : t + T]))


@pytest.mark.slow
def test_legacy_store_keeps_the_contract_and_is_mapped_over_batch_elements():
    model = build("legacy")
    graph, params = nnx.split(model)

    def one(state, token):
        return _call(graph, params, *jax.tree.map(lambda x: x[None], (state, token)))

    state, steps, step = model.init_state(B), [], jax.jit(jax.vmap(one))
    whole = run(model, state, TOKENS)
    for t in range(T):
        after, y = step(state, TOKENS[:, t : t + 1])
        state, y = jax.tree.map(lambda x: np.asarray(x)[:, 0], (after, y))
        steps.append(y)
    close(whole, (state, np.concatenate(steps, axis=1)))
    assert state.store is not None
    # Two of the three batches would go, and leave fewer than R: none goes.
    assert state.store.recalls[:, :6].tolist() == [[1, 1, 1, 1, 2, 2]] * B
    _, other = run(build("one"), build("one").init_state(B), TOKENS)
    assert np.abs(other - whole[1])[:, -1].max() > 1e-5


def test_causality_and_memory(case):
    model, states, _ = case
    _, logits = run(model, states[0], TOKENS)
    # In an early chunk, when the pool fills, and in the last that is written.
    for at, later in ((C + 1, 3 * C), (T - 4, T - 1)):
        _, other = run(model, states[0], change(TOKENS, slice(None), at))
        np.testing.assert_array_equal(other[:, :at], logits[:, :at])
        differs = np.abs(other - logits).max(axis=-1) > 1e-5
        # The token itself changes its score, and what is read from its memory.
        assert differs[:, at].all()
        assert differs[:, later].all()


@pytest.mark.slow
def test_batch_elements_are_independent():
    model, states, logits = stepped("mplus")
    at = 4 * C + 3
    state = model.reset(states[at], jnp.array([True, False]))
    tokens = LONG[:, at : at + T]
    after, y = run(model, state, tokens)
    _, fresh = run(model, states[0], tokens)
    # Then its pool is full, and drops rows by its own random numbers.
    close(y[0, : 4 * C], fresh[0, : 4 * C])
    close(y[1], logits[1, at : at + T])
    ends, steps = by_steps(model, state, tokens)
    close((after, y), (ends[-1], steps))
    assert ends[C].num_valid.tolist() == [K, N]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    # Another neighbour changes nothing.
    other, z = run(model, state, change(tokens, 0))

    def second(tree):
        return jax.tree.map(lambda x: np.asarray(x)[1], tree)

    close((second(other), z[1]), (second(after), y[1]), 1e-6)
    assert np.abs(z[0] - y[0]).max() > 1e-4


def test_reset_empties_memory_and_keeps_random_keys(case):
    model, states, _ = case
    used, fresh = states[T], states[0]
    state = model.reset(used, jnp.array([True, False]))

    def row(tree, i):
        return jax.tree.map(lambda x: np.asarray(x)[i], tree)

    chex.assert_trees_all_equal(row(state, 1), row(used, 1))
    np.testing.assert_array_equal(state.key, used.key)
    assert np.any(used.key[0] != fresh.key[0])
    anew = row(state._replace(key=fresh.key), 0)
    chex.assert_trees_all_equal(anew, row(fresh, 0))


def test_the_state_is_a_fixed_point_in_float32(case):
    model, states, _ = case

    def kind(x):
        return (x.shape, x.dtype, x.weak_type)

    expected = jax.tree.map(kind, states[0])
    for state in (states[T], run(model, states[0], TOKENS)[0]):
        assert jax.tree.map(kind, state) == expected
    for leaf in jax.tree.leaves(states[0]):
        assert leaf.shape[0] == B
        assert leaf.dtype in (jnp.float32, jnp.int32, jnp.uint32, bool)
    # One trace for all the states that its tokens went through.
    assert TRACED[nnx.graphdef(model), (B, 1)] == 1


@pytest.mark.slow
def test_gradients_are_finite_and_nonzero():
    model = build("one")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state, _ = run(model, model.init_state(B), TOKENS)
    # One row reads anew, and writes its chunk; the other starts its text.
    state = state._replace(cache_ready=jnp.zeros_like(state.cache_ready))
    state = model.reset(state, jnp.array([True, False]))
    memory = state.store
    assert memory is not None

    def loss(params, pool, rows):
        model = nnx.merge(graph, params, rest)
        layers = tuple(
            layer._replace(rows=x) for layer, x in zip(memory.layers, rows, strict=True)
        )
        store = memory._replace(layers=layers)
        given = state._replace(pool=pool, store=store)
        after, y = model(given, TOKENS[:, :1])
        return (y**2).mean() + (after.pool**2).mean()

    rows = tuple(layer.rows for layer in memory.layers)
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, state.pool, rows)
    chex.assert_tree_all_finite(found)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        name = jax.tree_util.keystr(path)
        # The choice of rows has no gradient: the retriever has a loss of its own.
        retriever = any(part in name for part in ("query'", "'key'")) and (
            "adapter" not in name
        )
        assert (np.abs(leaf).max() > 0) != retriever, name


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    """Without a store, of which next to equal scores may choose other rows."""
    low, high = build("memoryllm", dtype="bfloat16"), build("memoryllm")
    state, y = run(low, low.init_state(B), TOKENS)
    _, expected = run(high, high.init_state(B), TOKENS)
    error = np.linalg.norm(y - np.asarray(expected)) / np.linalg.norm(expected)
    assert 0 < error < 0.1
    low_parts = {x.dtype for x in (state.pool, *state.cache.keys, *state.cache.values)}
    assert low_parts == {jnp.dtype(jnp.bfloat16)}


def test_empty_memory_equals_the_backbone():
    """With the adapter that reads: without its changes, the backbone itself."""
    model = build()
    plain = add_mplus(model.backbone, CONFIG, key=jax.random.key(0))
    backbone = model.backbone
    _, expected = run(backbone, backbone.init_state(B), TOKENS)
    _, logits = run(plain, plain.init_state(B), TOKENS)
    close(logits[:, :C], expected[:, :C], 1e-5)
    assert np.abs(logits - expected)[:, C:].max(axis=-1).min() > 1e-4
    _, adapted = run(model, model.init_state(B), TOKENS)
    assert np.abs(adapted - expected)[:, :C].max() > 1e-3


# The verbs.


@pytest.mark.slow
def test_rows_of_the_store_change_the_logits():
    model, pool = build("one"), build("memoryllm")
    (after, y), (_, z) = (run(m, m.init_state(B), TOKENS) for m in (model, pool))
    assert after.store.num_valid.tolist() == [6, 6]
    same = (3 + 1) * C
    close(y[:, :same], z[:, :same])
    assert np.abs(y - z)[:, same:].max(axis=-1).min() > 1e-5


@pytest.fixture(name="injected", scope="module")
def _injected():
    """The memory before each third of a text and after the last."""
    model, states = build("one"), [build("one").init_state(B)]
    for start in (0, 9, 18):
        piece = TOKENS[:, start : start + 9]
        states.append(tiny.method(model, "inject", states[-1], piece))
    assert [state.length.tolist()[0] for state in states] == [0, 1, 2, 3]
    return model, states


@pytest.mark.slow
def test_inject_equals_call(injected):
    """But for the queries, which only tokens that were read have."""
    model, states = injected
    read_, _ = run(model, states[0], TOKENS)

    def bare(s):
        return s._replace(cache=0, cache_ready=0, queries=0, num_queries=0)

    close(bare(states[-1]), bare(read_))
    assert not states[-1].cache_ready.any()


def test_every_memory_token_keeps_its_birth_date():
    """Token j of update u is born at u K + j + 1, whether in the pool or the store."""
    _, states, _ = stepped("mplus")
    state = states[T]
    clock, count = int(state.clock[0]), int(state.store.num_valid[0])
    assert clock == 6 * K and count == clock - N
    for layer in range(L):
        stored = np.asarray(state.store.layers[layer].born)[0, :count]
        pooled = clock - np.asarray(state.ages)[0, layer]
        assert sorted([*stored, *pooled]) == list(range(1, clock + 1))
        # Rows of the pool are ordered by age.
        assert pooled.tolist() == sorted(pooled)


def test_queries_of_a_longer_previous_chunk_are_kept():
    model = build()
    state = model.init_state(B)._replace(
        num_queries=jnp.full(B, C, jnp.int32), length=jnp.array([2, C], jnp.int32)
    )
    given = [tiny.draw(i, B, C, D) for i in range(L)]
    keep = jax.jit(functools.partial(write._keep_queries, model.weights))
    after = keep(state, given, jnp.ones(B, bool))
    assert after.num_queries.tolist() == [C, C]
    assert not after.queries[0, :, 2:].any() and after.queries[1].all()


@pytest.mark.slow
def test_flush_writes_chunks_of_min_chunk_size(injected):
    model, (empty, one, two, _) = injected
    assert CONFIG.min_chunk_size == 2

    @jax.jit
    def pick(a, b):
        return jax.tree.map(lambda x, y: jnp.stack([x[0], y[1]]), a, b)

    state = pick(one, two)
    after = tiny.method(model, "flush", state)
    assert after.length.tolist() == [1, 0]
    assert after.clock.tolist() == [2 * K, 5 * K]
    assert after.tokens.tolist() == [[int(TOKENS[0, 8]), 0, 0, 0], [0] * C]
    chex.assert_trees_all_equal(pick(after, empty), pick(state, empty))
    new = tiny.method(model, "compress", state, TOKENS[:, 16:18])
    close(after.pool[1, :, -K:], new[1])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(graph, prompt, room, params, state, tokens):
    return nnx.merge(graph, params).read(
        state, tokens, ReadOptions(prompt_length=prompt, max_new_tokens=room)
    )


def read(model, state, tokens, prompt=None, room=0):
    graph, params = nnx.split(model)
    return _read(graph, prompt, room, params, state, tokens)


@pytest.mark.slow
def test_the_open_chunk_is_read(injected):
    """With fewer rows in the store than are read, which leaves nothing to choose."""
    model, (_, _, state, _) = injected
    assert state.store.num_valid.tolist() == [2, 2] and R == 3
    question = TOKENS[:, :6]
    _, logits = read(model, state, question)
    shut = state._replace(length=jnp.zeros_like(state.length))
    # There is nothing to choose: the program of the tests below is the same.
    text = np.concatenate([TOKENS[:, 16:18], question], axis=1)
    _, joined = read(model, shut, text, prompt=4)
    close(logits, joined[:, 2:])
    _, without = read(model, shut, question)
    assert np.abs(without - logits).max(axis=(1, 2)).min() > 1e-4
    # One row has an open chunk, the other none.
    mixed = state._replace(length=state.length.at[0].set(0))
    _, both = read(model, mixed, question)
    close(both, np.stack([without[0], logits[1]]))


@pytest.mark.slow
def test_prompt_alone_retrieves_and_decode_continues(injected):
    model, (*_, state) = injected
    tokens = TOKENS[:, 4:12]
    _, whole = read(model, state, tokens, prompt=4)
    reading, first = read(model, state, tokens[:, :4], prompt=4, room=4)
    close(first, whole[:, :4])
    one, rest = tiny.method(model, "decode", reading, tokens[:, 4:6])
    last, end = tiny.method(model, "decode", one, tokens[:, 6:])
    close(np.concatenate([rest, end], axis=1), whole[:, 4:])
    assert last.length.tolist() == [3 + 8] * B
    _, beyond = tiny.method(model, "decode", last, tokens[:, :2])
    assert np.isnan(beyond).all()


@pytest.mark.slow
def test_greedy_generation_equals_argmax_of_read(injected):
    """With penalties, for which tokens of prompt and answer count."""
    model, (*_, state) = injected
    prompt, count = TOKENS[:, 5:9], 5
    penalty = Sampling(0.0, repetition_penalty=9.0, presence_penalty=0.5)
    answer = model.generate(
        state, prompt, count, key=jax.random.key(0), sampling=penalty
    )
    assert answer.shape == (B, count)
    text = np.concatenate([prompt, np.asarray(answer)[:, :-1]], axis=1)
    _, logits = read(model, state, text, prompt=4)
    plain = np.asarray(logits)[:, 3:]
    assert np.any(answer != plain.argmax(axis=-1))
    for b, t in np.ndindex(B, count):
        scores = plain[b, t].copy()
        known = np.unique(text[b, : 4 + t])
        scores[known] *= np.where(scores[known] > 0, 1 / 9, 9)
        scores[np.unique(text[b, 4 : 4 + t])] -= 0.5
        assert answer[b, t] == scores.argmax()


@pytest.mark.slow
def test_generation_continues_beyond_a_chunk():
    model = build("memoryllm")
    state, drawn, *_ = generate(
        model, model.init_state(B), TOKENS[:, : C + 1], T - C - 1,
        key=jax.random.key(0), sampling=GREEDY, tokens_per_call=C + 1,
    )  # fmt: skip
    text = np.concatenate([TOKENS[:, : C + 1], drawn], axis=1)
    after, logits = run(model, model.init_state(B), text)
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1)[:, C:-1])
    close(state, after)


@pytest.mark.slow
def test_key_determines_dropped_rows():
    model = build()
    same = np.broadcast_to(TOKENS[:1], TOKENS.shape)
    states = [
        run(model, model.init_state(B, key=jax.random.key(seed)), same)[0]
        for seed in (0, 0, 1)
    ]
    chex.assert_trees_all_equal(states[0], states[1])
    assert np.any(states[0].ages != states[2].ages)
    assert np.any(states[0].ages[0] != states[0].ages[1])
    assert np.any(states[0].ages[:, 0] != states[0].ages[:, 1])


# Bad input.
