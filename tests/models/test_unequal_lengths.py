"""Texts of unequal length in one batch leave the memories that each alone would."""

import jax
import jax.numpy as jnp
import pytest

from tests import tiny

T, LENGTHS = 11, (10, 5, 0)
TOKENS = tiny.tokens(1, len(LENGTHS), T)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmt", "mplus", "reread"])
def test_ragged_features_equal_single_rows(name):
    model = tiny.drawn(lambda: tiny.make_model(name, num_layers=1))

    def element(tree, b):
        return jax.tree.map(lambda leaf: leaf[b], tree)

    empty = model.init_state(len(LENGTHS))
    state, features = model.features(empty, TOKENS, lengths=jnp.array(LENGTHS))
    tiny.assert_equal(element(state, 2), element(empty, 2))
    # The longer text in two calls, so that one program reads both.
    alone, found = empty, []
    for b in (1, 0):
        piece = TOKENS[:, 5 * len(found) :][:, :5]
        alone, part = model.features(alone, piece)
        found.append(part)
        expected = jnp.concatenate(found, axis=1)[b]
        tiny.assert_close(element(state, b), element(alone, b), 2e-5)
        tiny.assert_close(features[b, : LENGTHS[b]], expected, 2e-5)
