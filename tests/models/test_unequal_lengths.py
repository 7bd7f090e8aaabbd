"""Texts of unequal length in one batch leave the memories that each alone would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny

T, LENGTHS = 11, (10, 5, 0)
TOKENS = np.asarray(tiny.tokens(1, len(LENGTHS), T))


@functools.partial(jax.jit, static_argnums=0)
def _features(graph, params, state, tokens, lengths=None):
    return nnx.merge(graph, params).features(state, tokens, lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmt", "mplus", "reread"])
def test_ragged_features_equal_single_rows(name):
    model = tiny.drawn(lambda: tiny.make_model(name, num_layers=1))

    def element(tree, b):
        return jax.tree.map(lambda leaf: np.asarray(leaf)[b], tree)

    empty = model.init_state(len(LENGTHS))
    state, features = _features(*nnx.split(model), empty, TOKENS, jnp.array(LENGTHS))
    tiny.assert_equal(element(state, 2), element(empty, 2))
    # The longer text in two calls, so that one program reads both.
    alone, found = empty, []
    for b in (1, 0):
        piece = TOKENS[:, 5 * len(found) :][:, :5]
        alone, part = _features(*nnx.split(model), alone, piece)
        found.append(part)
        expected = np.concatenate(found, axis=1)[b]
        tiny.assert_close(element(state, b), element(alone, b), 2e-5)
        found_here = np.asarray(features)[b, : LENGTHS[b]]
        tiny.assert_close(found_here, expected, 2e-5)
