"""How much the loss rises when one layer alone sees a window."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.evaluation.sensitivity import layer_sensitivity, most_sensitive
from memjax.mechanisms import AttentionConfig, DeltaNetConfig
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.windowed import limit_layer
from memjax.models.loss import target_nll
from tests import tiny

WINDOW, SINKS = 4, 1


def loss_beyond(model, texts):
    state = model.init_state(len(texts))
    _, features = tiny.method(model, "features", state, jnp.asarray(texts[:, :-1]))
    losses = target_nll(
        model.logits, features, jnp.asarray(texts[:, 1:]), model.vocab_size
    )
    return float(losses[:, WINDOW + SINKS :].mean())


def test_sensitivity_is_the_rise_of_the_loss_with_one_window():
    model, texts = tiny.llama(), np.asarray(tiny.tokens(0, 2, 16))
    said = []
    rises = layer_sensitivity(
        model, texts, WINDOW, SINKS, lambda *done: said.append(done)
    )
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]
    full = loss_beyond(model, texts)
    # The second layer: the first is as it was.
    second = model.config.layers[1]
    assert isinstance(second, AttentionConfig)
    mechanisms = (model.config.layers[0], limit_layer(second, WINDOW, SINKS))
    windowed = loss_beyond(replace_config(model, mechanisms=mechanisms), texts)
    assert abs(windowed - full) > 1e-4
    np.testing.assert_allclose(rises[1], windowed - full, atol=1e-5)


def test_most_sensitive_layers_are_in_order():
    rises = [0.1, float("nan"), 0.5, -0.2, 0.4]
    assert most_sensitive(rises, 2) == (2, 4)
    assert most_sensitive(rises, 4) == (0, 2, 3, 4)
    for count in (0, 5):
        with pytest.raises(ValueError, match=r"count must be in \[1, 4\]"):
            most_sensitive(rises, count)


def test_bad_arguments():
    model, texts = tiny.llama(), np.asarray(tiny.tokens(0, 2, 6))
    with pytest.raises(ValueError, match=r"T > window \+ sinks \+ 1 = 6, got \[2, 6\]"):
        layer_sensitivity(model, texts, WINDOW, SINKS)
    config = dataclasses.replace(tiny.LLAMA, mechanisms=(DeltaNetConfig(16, 2, 4, 4),))
    other = tiny.drawn(lambda: tiny.make_llama(mechanisms=config.mechanisms))
    with pytest.raises(ValueError, match="model must have attention"):
        layer_sensitivity(other, np.asarray(tiny.tokens(0, 2, 16)), WINDOW, SINKS)
