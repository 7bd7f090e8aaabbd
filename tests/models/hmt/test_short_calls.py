"""A call that fits into the open segment reads its own tokens and no others."""

import jax
import jax.numpy as jnp
import pytest

from memjax.models import add_rmt
from memjax.models.hmt import model as hmt_model
from tests import tiny

B, L = 2, 16


@pytest.mark.slow
def test_short_call_equals_single_tokens():
    model = add_rmt(tiny.llama(), L, key=jax.random.key(0), activations="keep")
    tokens = tiny.tokens(0, B, 20)
    state, expected = model(model.init_state(B), tokens)
    # Within a segment, up to its end, and across it.
    short, found = model.init_state(B), []
    for start in range(0, 20, 5):
        short, logits = model(short, tokens[:, start : start + 5])
        found.append(logits)
    tiny.assert_close((short, jnp.concatenate(found, axis=1)), (state, expected), 2e-5)


def test_short_call_does_not_read_a_full_segment(monkeypatch):
    model = add_rmt(tiny.llama(), L, key=jax.random.key(0), activations="keep")
    read, lengths = hmt_model.read_tokens, []

    def watched(config, weights, state, tokens, mask):
        lengths.append(tokens.shape[1])
        return read(config, weights, state, tokens, mask)

    monkeypatch.setattr(hmt_model, "read_tokens", watched)
    jax.eval_shape(lambda s, x: model(s, x), model.init_state(B), tiny.tokens(0, B, 7))
    jax.eval_shape(lambda s, x: model(s, x), model.init_state(B), tiny.tokens(0, B, L))
    assert lengths == [7]
