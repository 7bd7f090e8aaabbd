"""A call that fits into the open segment reads its own tokens and no others."""

import jax
import numpy as np
import pytest

from memjax.models import add_rmt
from memjax.models.hmt import model as hmt_model
from tests import tiny

B, L = 2, 16


def build():
    def make():
        backbone = tiny.make_llama(num_layers=1)
        return add_rmt(backbone, L, key=jax.random.key(0), activations="keep")

    return tiny.drawn(make)


@pytest.mark.slow
def test_short_call_equals_single_tokens():
    model, tokens = build(), np.asarray(tiny.tokens(0, B, 20))
    state, expected = tiny.method(model, "__call__", model.init_state(B), tokens)
    # Within a segment, up to its end, and across it.
    short, found = model.init_state(B), []
    for start in range(0, 20, 5):
        part = tokens[:, start : start + 5]
        short, logits = tiny.method(model, "__call__", short, part)
        found.append(logits)
    tiny.assert_close((short, np.concatenate(found, axis=1)), (state, expected), 2e-5)


def test_short_call_does_not_read_a_full_segment(monkeypatch):
    model = build()
    read, lengths = hmt_model.read_tokens, []

    def watched(config, weights, state, tokens, mask):
        lengths.append(tokens.shape[1])
        return read(config, weights, state, tokens, mask)

    monkeypatch.setattr(hmt_model, "read_tokens", watched)
    jax.eval_shape(lambda s, x: model(s, x), model.init_state(B), tiny.tokens(0, B, 7))
    jax.eval_shape(lambda s, x: model(s, x), model.init_state(B), tiny.tokens(0, B, L))
    assert lengths == [7]
