"""A memory beside the window in chosen layers of a pretrained model."""

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import (
    AttentionConfig,
    DeltaNetConfig,
    ElasticMemoryConfig,
    HybridConfig,
    SlidingWindowConfig,
)
from memjax.models.language_model.config import Architecture
from memjax.models.language_model.distillation_init import initialise_from_teacher
from memjax.models.language_model.retrofit import (
    MemoryName,
    MemoryOptions,
    add_memory,
    retrofitted,
)
from memjax.models.language_model.teacher import measure_moments, shrink_covariance
from memjax.models.language_model.windowed import limit_attention
from memjax.nnx.params import as_arrays
from tests import tiny

WINDOW, SINKS, LENGTH = 6, 2, 21
KEY = jax.random.key(1)


@functools.cache
def fitted(name: MemoryName, **options):
    return add_memory(
        tiny.llama(num_layers=1),
        memory=name,
        layers=(0,),
        window=WINDOW,
        sinks=SINKS,
        options=MemoryOptions(**options),
        key=KEY,
    )


def opened(model, amount: float = 0.7):
    """The same model, whose memories have a part in the output."""
    new = nnx.clone(model)
    for block, mechanism in zip(new.blocks, new.config.layers, strict=True):
        if isinstance(mechanism, HybridConfig):
            was = block.mechanism.balance.amount
            was.set_value(jnp.full_like(was.get_value(), amount))
    return new


def read(model, tokens, cuts=()):
    """State and logits after the pieces between the cuts."""
    state, found = model.init_state(tokens.shape[0]), []
    for piece in np.split(np.asarray(tokens), cuts, axis=1):
        state, logits = tiny.method(model, "__call__", state, piece)
        found.append(logits)
    return state, np.concatenate(found, axis=1)


# Of cells alike, the one with more gates: GDN-2, GLA, linear attention and those of
# DeltaNet are KDA with fewer, ABC is GSA without. TTT reads chunks as Lattice does.
ALIKE = {"gdn2", "gla", "linear_attention", "deltanet", "gated_deltanet", "abc"}
ALIKE |= {"ttt_linear"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "lattice" else pytest.mark.slow)
        for name in get_args(MemoryName)
        if name not in ALIKE
    ],
)
def test_initial_hybrid_equals_windows(name):
    tokens = tiny.tokens(0, 2, LENGTH)
    windowed = limit_attention(tiny.llama(num_layers=1), WINDOW, SINKS)
    expected = read(windowed, tokens)[1]
    tiny.assert_close(read(fitted(name), tokens)[1], expected)
    # And differs from it where the memory has a part, beyond the window alone.
    changed = np.abs(read(opened(fitted(name)), tokens)[1] - expected)
    assert changed[:, :WINDOW].max() < 1e-5 < 1e-3 < changed[:, WINDOW:].max()


def test_split_invariance_and_constant_state_size():
    model, tokens = opened(fitted("gated_deltanet")), tiny.tokens(1, 2, LENGTH)
    state, logits = read(model, tokens)
    again, pieces = read(model, tokens, (7, 14))
    tiny.assert_close(pieces, logits)
    tiny.assert_close(again, state)

    def shapes(state):
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    assert shapes(state) == shapes(model.init_state(2, 10_000))


@pytest.mark.slow
def test_a_long_text_streams_in_constant_memory():
    model = opened(fitted("gated_deltanet"))
    tokens = np.asarray(tiny.tokens(2, 1, 20_000))
    state, logits = model.init_state(1), None

    def sizes():
        return [(x.shape, x.dtype) for x in jax.tree.leaves(state)]

    before = sizes()
    for start in range(0, tokens.shape[1], 2000):
        piece = jnp.asarray(tokens[:, start : start + 2000])
        state, logits = tiny.method(model, "__call__", state, piece)
    assert sizes() == before
    assert logits is not None and np.all(np.isfinite(logits))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_arrays_are_shared_and_the_model_is_unchanged():
    model = tiny.make_llama()
    before = nnx.to_pure_dict(nnx.state(model))
    new = add_memory(model, memory="lattice", layers=(0,), window=4, sinks=0, key=KEY)
    mechanism, attention = new.blocks[0].mechanism, model.blocks[0].mechanism
    assert mechanism.attention.query.get_value() is attention.query.get_value()
    assert new.embedding.get_value() is model.embedding.get_value()
    tiny.assert_equal(nnx.to_pure_dict(nnx.state(model)), before)
    assert model.config == tiny.LLAMA
    # What is new is drawn by the key and the layer.
    other = add_memory(model, memory="lattice", layers=(0, 1), window=4, key=KEY)

    def drawn(model, i):
        return model.blocks[i].mechanism.memory.step.weight.get_value()

    tiny.assert_equal(drawn(other, 0), drawn(new, 0))
    assert np.abs(drawn(other, 0) - drawn(other, 1)).max() > 1e-3


def test_other_mechanisms_are_unchanged():
    mechanism = DeltaNetConfig(16, 2, 4, 4)
    config = dataclasses.replace(
        tiny.LLAMA, mechanisms=(*tiny.LLAMA.mechanisms, mechanism)
    )
    found = retrofitted(config, "gla", (0,), 4, 1, "beside").layers
    assert isinstance(found[0], HybridConfig) and found[1] == mechanism
    # A config of the caller's own stands for all chosen layers.
    own = DeltaNetConfig(16, 4, 8, 2)
    beside = retrofitted(config, own, (0,), 4, 1, "beside").layers[0]
    assert isinstance(beside, HybridConfig) and beside.memory == own
    assert beside.window == SlidingWindowConfig(16, 4, 2, 4, window=4, sinks=1)


def test_attention_sizes_are_unchanged():
    config = retrofitted(tiny.LLAMA, "gsa", (1,), 4, 1, "beside")
    assert config.heads == tiny.LLAMA.heads
    assert (config.window, config.capacity) == (4, None)


def test_elastic_replaces_a_layer():
    options = MemoryOptions(order=5, sampling="exponential")
    changed = retrofitted(tiny.LLAMA, "elastic", (1,), 4, 0, "instead", options)
    first, second = changed.layers
    assert isinstance(first, SlidingWindowConfig)
    assert isinstance(second, ElasticMemoryConfig)
    assert (second.block, second.order, second.sampling) == (4, 5, "exponential")


TINY: dict[str, Any] = dict(
    memory="lattice", layers=(0,), window=4, sinks=1, placement="beside"
)
ELASTIC = ElasticMemoryConfig(16, 4, 2, 4, block=8)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layers=()), "layers must be at least one, got none"),
        (dict(layers=(0, 2)), r"layers=\(0, 2\): 2 is not in \[0, 2\)"),
        (dict(layers=(0, -1)), "-1 is not in"),
        (dict(layers=(1, 1)), r"layers=\(1, 1\): 1 is given twice"),
        (dict(memory="latice"), "memory must be one of .*did you mean 'lattice'"),
        (
            dict(memory=DeltaNetConfig(16, 3, 4, 4)),
            "memory.num_heads must be 4 or 2 with this window",
        ),
        (dict(memory=ELASTIC), "memory must be a cell's configuration, got Elastic"),
        (dict(sinks=5), r"sinks must be in \[0, window=4\], got 5"),
        (dict(placement="instead"), "placement='instead' needs memory='elastic'"),
        (dict(placement="instead", memory=ELASTIC), "and block=4, the window; got"),
        (dict(options=MemoryOptions(order=3)), "options.order must be None with"),
        (
            dict(memory="infini", options=MemoryOptions(heads="query")),
            "options.heads must be None with memory='infini', got query",
        ),
        (
            dict(memory=DeltaNetConfig(16, 4, 4, 4), options=MemoryOptions(key_dim=3)),
            "options must not be given with a configured memory",
        ),
    ],
)
def test_invalid_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        retrofitted(tiny.LLAMA, **(TINY | changes))


def test_invalid_models_are_refused():
    mechanisms = (DeltaNetConfig(16, 2, 4, 4), *tiny.LLAMA.mechanisms)
    hybrid = dataclasses.replace(tiny.LLAMA, mechanisms=mechanisms)
    with pytest.raises(ValueError, match="0 is a DeltaNetConfig, not attention"):
        retrofitted(hybrid, **TINY)
    learned = dataclasses.replace(
        tiny.LLAMA,
        mechanisms=(AttentionConfig(16, 4, 2, 4, rope_theta=None, capacity=64),),
        architecture=Architecture(learned_positions=66),
    )
    with pytest.raises(ValueError, match="model must have RoPE"):
        retrofitted(learned, **TINY)


@functools.cache
def calibrated(name: MemoryName, **options):
    model = tiny.drawn(tiny.make_llama)
    new = add_memory(
        model,
        memory=name,
        layers=(1,),
        window=WINDOW,
        sinks=SINKS,
        options=MemoryOptions(**options),
        key=KEY,
    )
    texts = np.asarray(tiny.tokens(3, 4, 32))
    moments = measure_moments(new, tiny.LLAMA, texts)[1]
    return new, initialise_from_teacher(new, tiny.LLAMA, texts), moments


@pytest.mark.parametrize("heads, memories", [("query", 4), ("key_value", 2)])
def test_features_whiten_keys_and_preserve_scores(heads, memories):
    _, model, moments = calibrated("deltanet", heads=heads)
    maps = as_arrays(model.blocks[1].mechanism.features)
    assert maps.key.shape == (memories, 4, 4)
    for head in range(4):
        keys = slice(head // 2 * 4, head // 2 * 4 + 4)
        covariance = shrink_covariance(moments.covariance[keys, keys])
        memory = head * memories // 4
        key, query = maps.key[memory], maps.query[head]
        np.testing.assert_allclose(key.T @ covariance @ key, np.eye(4), atol=1e-4)
        np.testing.assert_allclose(query @ key.T, np.eye(4), atol=1e-4)
        bias = maps.key_bias.reshape(memories, 4)[memory]
        np.testing.assert_allclose(moments.mean[keys] @ key + bias, 0, atol=1e-5)
        np.testing.assert_allclose(
            maps.value[memory] @ maps.read[head], np.eye(4), atol=1e-5
        )


@pytest.mark.parametrize("key_dim, value_dim", [(3, 2), (6, 7)])
def test_other_widths_keep_principal_directions(key_dim, value_dim):
    _, model, moments = calibrated("deltanet", key_dim=key_dim, value_dim=value_dim)
    maps = as_arrays(model.blocks[1].mechanism.features)
    covariance = shrink_covariance(moments.covariance[:4, :4])
    found = np.linalg.eigvalsh(maps.key[0].T @ covariance @ maps.key[0])
    kept = min(key_dim, 4)
    np.testing.assert_allclose(np.sort(found)[-kept:], np.ones(kept), atol=1e-4)
    # A projection: what it keeps of a query's scores is all that the map holds.
    product = maps.query[0] @ maps.key[0].T
    np.testing.assert_allclose(product @ product, product, atol=1e-4)
    assert np.linalg.matrix_rank(product, tol=1e-3) == kept
    # The largest direction is among those that are kept.
    largest = np.linalg.eigh(covariance)[1][:, -1]
    np.testing.assert_allclose(largest @ product, largest, atol=1e-4)
    assert np.linalg.matrix_rank(maps.value[0] @ maps.read[0], tol=1e-3) == min(
        value_dim, 4
    )


def test_initialisation_preserves_the_windowed_model():
    before, after, _ = calibrated("deltanet")
    tokens = tiny.tokens(0, 2, LENGTH)
    tiny.assert_close(read(after, tokens)[1], read(before, tokens)[1])
    mechanism = before.blocks[1].mechanism
    assert (
        after.blocks[1].mechanism.attention.query.get_value()
        is mechanism.attention.query.get_value()
    )
    tiny.assert_equal(mechanism.features.key.get_value()[0], jnp.eye(4))


@pytest.mark.parametrize(
    "name", ["gated_deltanet", "mamba2", "gla", "kda", "gsa", "trellis"]
)
def test_gates_have_the_half_lives(name):
    """Of what is written with the mean token, half is left after the half-life."""
    _, model, moments = calibrated(name)
    layer: Any = model.config.layers[1]
    config = layer.memory
    params = as_arrays(model.blocks[1].mechanism.memory)
    x = jnp.asarray(moments.mean, jnp.float32)[None]
    shortest, longest = WINDOW, 32
    count = 64 if name == "gsa" else 4
    half_lives = np.geomspace(shortest, longest, count)
    kept = _kept(config, params, x)
    np.testing.assert_allclose(kept**half_lives, np.full(count, 0.5), rtol=1e-3)


def _kept(config, params, x):
    """exp(g) of each head (GSA: of each slot) for a token x."""
    module = __import__(type(config).__module__, fromlist=["x"])
    heads = jnp.ones((1, config.num_heads, config.key_dim))
    if type(config).__name__ == "GSAConfig":
        return np.exp(module._gates(config, params, x, heads)[2][0, 0])
    if type(config).__name__ == "TrellisConfig":
        return np.exp(module._tokens(config, params, None, None, heads, x)[-1][0])
    if type(config).__name__ == "GLAConfig":
        return np.exp(module._log_gates(config, params, x, heads)[0][0, :, 0])
    if type(config).__name__ == "KDAConfig":
        return np.exp(module.log_decays(params, x)[0, :, 0])
    return np.exp(module.decay(params.decay, x)[1][0])
