"""A window over a model with attention: its parameters, its numbers, constant size."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GLAConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture
from memjax.models.language_model.windowed import (
    limit_attention,
    set_capacity,
    widen_windows,
)
from tests import tiny as tiny_models

T, V, W = 12, 11, 5
ATTENTION = AttentionConfig(8, 2, 1, 4, capacity=T)
CONFIG = ModelConfig(
    mechanisms=(ATTENTION,),
    num_layers=2,
    vocab_size=V,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
TOKENS = jax.random.randint(jax.random.key(1), (1, T), 0, V)


@functools.cache
def tiny():
    return tiny_models.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


def logits(model, tokens=TOKENS):
    return np.asarray(jax.jit(model.__call__)(model.init_state(1), tokens)[1][0])


def test_equal_inside_the_window():
    window = limit_attention(tiny(), W)
    whole, cut = logits(tiny()), logits(window)
    np.testing.assert_allclose(cut[:W], whole[:W], atol=1e-5)
    assert np.abs(cut[W:] - whole[W:]).max() > 1e-3
    np.testing.assert_allclose(logits(limit_attention(tiny(), T)), whole, atol=1e-5)
    # Sinks lengthen what is seen whole.
    sinks = logits(limit_attention(tiny(), W, sinks=2))
    np.testing.assert_allclose(sinks[: W + 2], whole[: W + 2], atol=1e-5)
    assert np.abs(sinks[W + 2 :] - cut[W + 2 :]).max() > 1e-3


def test_parameters_are_shared_and_the_model_is_unchanged():
    window = limit_attention(tiny(), W)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(window, nnx.Param),
        nnx.state(tiny(), nnx.Param),
    )
    assert tiny().config == CONFIG and window.config.window == W
    sizes = {leaf.shape[1] for leaf in jax.tree.leaves(window.init_state(1))[:2]}
    assert sizes == {W}


@pytest.mark.parametrize(
    ("changes", "window", "message"),
    [
        ({}, 0, "window must be at least 1, got 0"),
        (
            {"mechanisms": (GLAConfig(CONFIG.model_dim, 2, 4, 4),)},
            4,
            "layers of attention alone, and others without any, got GLAConfig",
        ),
        (
            {
                "mechanisms": (dataclasses.replace(ATTENTION, rope_theta=None),),
                "architecture": Architecture(learned_positions=16),
            },
            4,
            "must have RoPE .* got learned_positions=16",
        ),
    ],
)
def test_other_models_are_refused(changes, window, message):
    config = dataclasses.replace(CONFIG, **changes)
    shapes = nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=message):
        limit_attention(shapes, window)


def test_widen_windows():
    model = widen_windows(limit_attention(tiny(), W, 1), [1], 3)
    windows = [(vars(m)["window"], vars(m)["sinks"]) for m in model.config.layers]
    assert windows == [(W, 1), (W + 3, 1)]
    with pytest.raises(
        ValueError, match="layers must be windows, got 0, AttentionConfig"
    ):
        widen_windows(tiny(), [0], 3)
    with pytest.raises(ValueError, match="more must be at least 1"):
        widen_windows(model, [0], 0)


def test_set_capacity_changes_caches_only():
    small = set_capacity(tiny(), 5)
    assert {state.keys.shape[1] for state in small.init_state(1)} == {5}
    assert small.config.capacity == 5 and tiny().config.capacity == T
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(small, nnx.Param),
        nnx.state(tiny(), nnx.Param),
    )
