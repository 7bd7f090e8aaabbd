"""Layers windowed in turn: means by kind are those of the documents."""

import numpy as np
import pytest

from experiments.memories import layers
from memjax import evaluation
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.windowed import limit_attention
from tests import tiny
from tests.experiments.lab.test_measure import make_text

CONFIG = layers.Config(backbone="tiny", window=4, sinks=2, tokens=20, least=1)


def test_rises_are_of_the_models_with_these_layers():
    model = tiny.drawn(lambda: tiny.make_llama(num_layers=2))
    texts = [make_text("a", "proofs"), make_text("b", "code"), make_text("c", "code")]
    full, window = model.config.layers[0], limit_attention(model, 4, 2).config.layers[0]

    def losses(*mechanisms):
        one = replace_config(model, mechanisms=mechanisms)
        found = evaluation.token_losses(one, texts, tokens_per_call=20, batch_size=3)
        return found.nll[:, 6:].mean(axis=1)

    found = layers.rises(model, texts, CONFIG)
    for row, mixed in zip(found, ((window, full), (full, window)), strict=True):
        rise = losses(*mixed) - losses(full, full)
        assert row["all"]["nats"] == pytest.approx(rise.mean(), abs=1e-5)
        assert row["code"]["nats"] == pytest.approx(rise[1:].mean(), abs=1e-5)
        error = np.std(rise[1:], ddof=1) / 2**0.5
        assert row["code"]["standard_error"] == pytest.approx(error, abs=1e-5)
