"""A window over a model with attention: its parameters, its numbers, constant size."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture
from memjax.models.language_model.windowed import with_window

T, V, W = 12, 11, 5
CONFIG = ModelConfig(
    mixers=("attention",) * 2,
    vocab_size=V,
    model_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_dim=8,
    capacity=T,
    dtype="float32",
    remat=False,
)
MODEL = LanguageModel(CONFIG, key=jax.random.key(0))
TOKENS = jax.random.randint(jax.random.key(1), (1, T), 0, V)


def logits(model, tokens=TOKENS):
    return np.asarray(jax.jit(model.__call__)(model.init_state(1), tokens)[1][0])


def test_inside_the_window_it_is_the_model():
    window = with_window(MODEL, W)
    whole, cut = logits(MODEL), logits(window)
    np.testing.assert_allclose(cut[:W], whole[:W], atol=1e-5)
    assert np.abs(cut[W:] - whole[W:]).max() > 1e-3
    np.testing.assert_allclose(logits(with_window(MODEL, T)), whole, atol=1e-5)


def test_parameters_are_the_same_and_the_model_is_left_alone():
    window = with_window(MODEL, W)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(window, nnx.Param),
        nnx.state(MODEL, nnx.Param),
    )
    assert MODEL.config == CONFIG and window.config.window == W
    sizes = {leaf.shape[1] for leaf in jax.tree.leaves(window.init_state(1))[:2]}
    assert sizes == {W}


@pytest.mark.parametrize(
    ("changes", "window", "message"),
    [
        ({}, 0, "window must be at least 1, got 0"),
        ({"mixers": ("attention", "gla")}, 4, r"attention in every layer, got \['gla"),
        (
            {"architecture": Architecture(positions="learned", learned_positions=16)},
            4,
            "positions='rope'",
        ),
    ],
)
def test_other_models_are_refused(changes, window, message):
    config = dataclasses.replace(CONFIG, **changes)
    shapes = nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=message):
        with_window(shapes, window)
