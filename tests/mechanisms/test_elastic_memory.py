"""Elastic Memory against a literal Algorithm 1 in float64, and the paper's facts."""

import functools
import importlib
import inspect
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.elastic_memory import ElasticMemoryConfig, flush
from memjax.mechanisms.layers.rope import RopeScaling
from memjax_kernels._src.hippo import bank

# The package re-exports the builder under the module's name.
elastic_memory = importlib.import_module("memjax.mechanisms.elastic_memory")

B, T, D, H, G, K, L, N, M = 2, 14, 8, 4, 2, 4, 4, 6, 5
THETA = 100.0
HEADS: dict[str, Any] = dict(
    model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, rope_theta=THETA
)


def config_of(**options):
    sizes: dict[str, Any] = dict(block=L, order=N, memory_tokens=M, decay=0.6)
    return ElasticMemoryConfig(**HEADS | sizes | options)


@functools.cache
def elastic(**options):
    mechanism = config_of(**options).build()
    return mechanism._replace(
        apply=jax.jit(mechanism.apply), step=jax.jit(mechanism.step)
    )


@functools.cache
def drawn_params():
    return elastic().init_params(jax.random.key(0))


@functools.cache
def drawn_inputs() -> Any:
    return np.random.default_rng(1).standard_normal((B, T, D), np.float32)


def apply_rope(x, positions):
    """RoPE as complex rotation: channels i and i + K/2 are one number."""
    half = K // 2
    angle = positions[:, None] * THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def algorithm_1(x, sampling, positions, edges):
    """One row, token by token and head by head; blocks end at `edges`.

    Returns the outputs [T, D] and the coefficients of keys and values [G, N, K].
    """
    x = np.asarray(x, np.float64)
    query, key, value, output = (np.asarray(w, np.float64) for w in drawn_params()[:4])
    q, k, v = (np.einsum("td,dhk->thk", x, w) for w in (query, key, value))
    read = bank.hippo_reconstruction(N, bank.hippo_sample_points(M, sampling, 0.6))
    memory = np.zeros((2, G, N, K))
    outputs = np.zeros((len(x), D))
    for start, stop in zip([0, *edges[:-1]], edges, strict=True):
        at = np.arange(start, stop) - (start if positions == "block" else 0)
        here = slice(start, min(stop, len(x)))
        at = at[: here.stop - start]
        queries, keys = apply_rope(q[here], at), apply_rope(k[here], at)
        for i, h in np.ndindex(here.stop - start, H):
            g = h // (H // G)
            past = read if start else read[:0]
            all_keys = np.concatenate([past @ memory[0, g], keys[: i + 1, g]])
            all_values = np.concatenate([past @ memory[1, g], v[here][: i + 1, g]])
            weights = np.exp(all_keys @ queries[i, h] / np.sqrt(K))
            y = weights @ all_values / weights.sum()
            outputs[start + i] += y @ output[h]
        if stop <= len(x):
            kernel = bank.block_kernel(N, start, stop)
            for which, signal in enumerate((k, v)):
                for g in range(G):
                    moved = bank.transition(N, start / stop) @ memory[which, g]
                    memory[which, g] = moved + kernel @ signal[here, g]
    return outputs, memory


def read(mechanism, state, *ends):
    """The state after tokens up to the last end, and their outputs, part by part.

    Of few lengths: each is compiled.
    """
    outputs = []
    for begin, end in itertools.pairwise(ends):
        state, y = mechanism.apply(drawn_params(), state, drawn_inputs()[:, begin:end])
        outputs.append(y)
    return state, np.concatenate(outputs, axis=1)


@jax.jit
def flushed_of(state):
    return flush(config_of(), state)


def close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "length,options",
    [
        (14, dict()),
        (12, dict(sampling="exponential", positions="stream", bank_blocks=3)),
        (14, dict(sampling="exponential", implementation="direct")),
    ],
)
def test_apply_is_algorithm_1(length, options):
    """Blocks that the segment fills, and one that it leaves open."""
    mechanism, x = elastic(**options), drawn_inputs()[:, :length]
    state, y = mechanism.apply(drawn_params(), mechanism.init_state(B), x)
    sampling = options.get("sampling", "uniform")
    positions = options.get("positions", "block")
    for row in range(B):
        edges = list(range(L, length + L, L))
        expected = algorithm_1(x[row], sampling, positions, edges)
        close(y[row], expected[0])
        close(np.stack([state.keys, state.values])[:, row], expected[1])
    assert state.length.tolist() == [12] * B
    assert state.open_length.tolist() == [length - 12] * B


@pytest.mark.slow
def test_parameters_equal_those_of_attention():
    plain = AttentionConfig(**HEADS, capacity=L).build()
    weights = plain.init_params(jax.random.key(0))
    chex.assert_trees_all_equal(weights, drawn_params())
    apply = jax.jit(plain.apply)
    _, expected = apply(weights, plain.init_state(B), drawn_inputs()[:, :L])
    _, y = elastic().apply(weights, elastic().init_state(B), drawn_inputs()[:, :L])
    close(y, expected)


def test_sampling_is_chosen_at_call_time():
    """The same parameters and state, read at other points: Tables 5 and 6."""
    one, other = elastic(sampling="uniform"), elastic(sampling="exponential")
    state, _ = one.apply(drawn_params(), one.init_state(B), drawn_inputs())
    same, y = one.apply(drawn_params(), state, drawn_inputs())
    swapped, z = other.apply(drawn_params(), state, drawn_inputs())
    chex.assert_trees_all_equal_shapes_and_dtypes(state, other.init_state(B))
    # What is remembered does not depend on where it is read; what is read does.
    chex.assert_trees_all_close(same, swapped, rtol=1e-6, atol=1e-6)
    assert np.abs(np.subtract(y, z)).max() > 1e-3


@pytest.mark.parametrize("positions", ["block", "stream"])
def test_the_open_block_is_compressed_without_scaled_rope(positions):
    scaling = RopeScaling("yarn", 4.0, original_positions=16)
    mechanism = elastic(rope_scaling=scaling, positions=positions)
    x = drawn_inputs()[:, : 2 * L + 2]
    # Whole blocks never lie open; steps fill one after the other.
    state, expected = mechanism.apply(drawn_params(), mechanism.init_state(B), x)
    one, found = mechanism.init_state(B), []
    for t in range(x.shape[1]):
        one, y = mechanism.step(drawn_params(), one, x[:, t])
        found.append(y)
    close(np.stack(found, axis=1), expected)
    jax.tree.map(close, one, state)


@pytest.mark.parametrize("call", ["apply", "step"])
def test_memory_is_invisible_before_the_first_block_is_compressed(call):
    mechanism = elastic()
    x = drawn_inputs()[:, :1] if call == "apply" else drawn_inputs()[:, 0]
    run = getattr(mechanism, call)
    empty = mechanism.init_state(B)
    garbage = empty._replace(keys=empty.keys + 3, values=empty.values - 2)
    np.testing.assert_array_equal(
        run(drawn_params(), garbage, x)[1], run(drawn_params(), empty, x)[1]
    )
    # The same after one block is seen.
    seen = jnp.full(B, L, jnp.int32)
    later = garbage._replace(length=seen), empty._replace(length=seen)
    y, z = (run(drawn_params(), state, x)[1] for state in later)
    assert np.abs(np.subtract(y, z)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["block", "stream"])
def test_block_positions_do_not_depend_on_stream_length(positions):
    """With equal memories, a block reads the same at token 8 and at token 8000."""
    mechanism = elastic(positions=positions)
    state, _ = read(mechanism, mechanism.init_state(B), 0, 4, 8)
    late = state._replace(length=jnp.full(B, 8000, jnp.int32))
    _, y = mechanism.apply(drawn_params(), state, drawn_inputs()[:, :3])
    _, z = mechanism.apply(drawn_params(), late, drawn_inputs()[:, :3])
    if positions == "block":
        np.testing.assert_array_equal(y, z)
    else:
        assert np.abs(np.subtract(y, z)).max() > 1e-3


def test_past_blocks_are_visible_only_through_the_memory():
    mechanism = elastic()
    a, _ = read(mechanism, mechanism.init_state(B), 0, 4, 8)
    b, _ = read(mechanism, mechanism.init_state(B), 4, 8, 12)
    moved = b._replace(keys=a.keys, values=a.values)
    _, y = read(mechanism, a, 8, 12)
    _, z = read(mechanism, moved, 8, 12)
    _, other = read(mechanism, b, 8, 12)
    np.testing.assert_array_equal(y, z)
    assert np.abs(np.subtract(y, other)).max() > 1e-3


def test_flush_compresses_a_short_block():
    mechanism = elastic()
    state, first = read(mechanism, mechanism.init_state(B), 0, 3)
    flushed = flushed_of(state)
    assert (
        flushed.length.tolist() == [3] * B and flushed.open_length.tolist() == [0] * B
    )
    assert not any(
        map(np.any, jax.device_get((flushed.open_keys, flushed.open_values)))
    )
    # From the middle of a block on, and into the middle of one.
    state, second = read(mechanism, flushed, 3, 6, 10, 13)
    y = np.concatenate([first, second], axis=1)
    for row in range(B):
        expected = algorithm_1(
            drawn_inputs()[row, :13], "uniform", "block", [3, 7, 11, 15]
        )
        close(y[row], expected[0])
        close(np.stack([state.keys, state.values])[:, row], expected[1])


def test_flush_of_no_open_block_changes_nothing():
    mechanism = elastic()
    state, _ = read(mechanism, mechanism.init_state(B), 0, 4, 8)
    mixed = mechanism.reset(state, jnp.array([True, False]))
    chex.assert_trees_all_equal(flushed_of(mixed), mixed)


@pytest.mark.slow
def test_a_thousand_blocks_in_half_precision_stay_bounded():
    """Unit-variance inputs, bfloat16 compute, float32 state: a contraction."""
    sizes: dict[str, Any] = HEADS | dict(num_heads=1, num_kv_heads=1)
    config = ElasticMemoryConfig(**sizes, block=8, order=16, memory_tokens=4)
    mechanism = config.build()
    params = mechanism.init_params(jax.random.key(0))

    def body(state, key):
        x = jax.random.normal(key, (1, 8, D), jnp.bfloat16)
        state, y = mechanism.apply(params, state, x)
        norms = jnp.sqrt(jnp.sum(state.keys**2)), jnp.sqrt(jnp.sum(state.values**2))
        return state, (*norms, jnp.isfinite(y).all())

    keys = jax.random.split(jax.random.key(1), 1000)
    state, (key_norms, value_norms, finite) = jax.jit(
        lambda state: jax.lax.scan(body, state, keys)
    )(mechanism.init_state(1))
    assert finite.all() and state.keys.dtype == jnp.float32
    assert state.length.tolist() == [8000]
    for norms in (key_norms, value_norms):
        # K channels of unit variance have norm sqrt(K) at most, and averages shrink.
        assert norms.max() < 3 * np.sqrt(K) and norms[-1] < norms[0]
        assert norms[-1] > 1e-3


def test_memory_tokens_default_to_the_fewer_of_order_and_block():
    assert config_of(memory_tokens=None, order=6, block=4).samples == 4
    assert config_of(memory_tokens=None, order=3, block=4).samples == 3
    assert config_of(memory_tokens=9, order=3, block=4).samples == 9


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(order=0), "order must be at least 1, got 0"),
        (dict(block=0), "block must be at least 1, got 0"),
        (dict(memory_tokens=0), "memory_tokens must be at least 1, got 0"),
        (dict(sampling="random"), "sampling must be .*, got 'random'"),
        (dict(decay=1.0), "decay must be in .0, 1., got 1.0"),
        (dict(decay=0.0), "decay must be in .0, 1., got 0.0"),
        (dict(bank_blocks=-1), "bank_blocks must be at least 0, got -1"),
        (dict(positions="none"), "positions must be .*, got 'none'"),
        (dict(implementation="pallas"), "implementation must be .*, got 'pallas'"),
    ],
)
def test_invalid_options_are_refused(monkeypatch, wrong, message):
    # Past the annotations' own check, which only the tests have.
    points = inspect.unwrap(bank.hippo_sample_points)
    monkeypatch.setattr(elastic_memory, "hippo_sample_points", points)
    build = inspect.unwrap(ElasticMemoryConfig.__init__)
    with pytest.raises(ValueError, match=message):
        build(object.__new__(ElasticMemoryConfig), **HEADS | wrong)


@pytest.mark.parametrize("tokens_before", [2**20, 2**24 - L, 2**30 - L])
def test_apply_is_step_far_on_in_a_stream(tokens_before: int):
    """RoPE counts on; the counter ends within the last of these texts."""
    mechanism = elastic(positions="stream", rope_theta=500_000.0)
    state, _ = mechanism.apply(drawn_params(), mechanism.init_state(B), drawn_inputs())
    start = state._replace(length=jnp.full_like(state.length, tokens_before))
    _, whole = mechanism.apply(drawn_params(), start, drawn_inputs())
    state, rows = start, []
    for t in range(T):
        state, y = mechanism.step(drawn_params(), state, drawn_inputs()[:, t])
        rows.append(y)
    np.testing.assert_allclose(whole, np.stack(rows, axis=1), atol=2e-6)


@pytest.mark.usefixtures("all_platforms")
def test_a_vmap_lowers_for_a_tpu():
    memory = ElasticMemoryConfig(16, 2, 1, 8, block=4, order=4).build()
    params, state = memory.init_params(jax.random.key(0)), memory.init_state(2)
    states = jax.tree.map(lambda x: x[:, None], state)
    apply = jax.vmap(memory.apply, in_axes=(None, 0, 0))
    traced = jax.jit(apply).trace(params, states, jnp.zeros((2, 1, 8, 16)))
    assert "legendre" in traced.lower(lowering_platforms=("tpu",)).as_text()
