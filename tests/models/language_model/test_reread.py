"""Reading the last tokens again is the backbone on those tokens and the segment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models.language_model.reread import ReReadWindow
from tests import tiny

N, S, T = 5, 4, 15
TOKENS = tiny.tokens(1, 2, T)


@pytest.fixture(scope="module", name="backbone")
def _backbone():
    return tiny.drawn(lambda: tiny.make_llama(num_layers=1))


@pytest.fixture(scope="module", name="model")
def _model(backbone):
    return ReReadWindow(backbone, reread=N, segment=S)


def by_hand(backbone, tokens, reread):
    """Logits of each segment, from the backbone alone on [last n ; segment]."""
    found = []
    for start in range(0, tokens.shape[1], S):
        first = max(0, start - reread)
        piece = tokens[:, first : start + S]
        # One length for all, as later tokens change nothing.
        padded = np.pad(piece, ((0, 0), (0, N + S - piece.shape[1])))
        padded = jnp.asarray(padded)
        logits = backbone(backbone.init_state(len(tokens), N + S), padded)[1]
        found.append(np.asarray(logits)[:, start - first : piece.shape[1]])
    return np.concatenate(found, axis=1)


@pytest.fixture(scope="module", name="expected")
def _expected(backbone):
    return by_hand(backbone, TOKENS, N)


def test_equals_backbone_on_last_tokens_and_segment(model, expected):
    state, logits = model(model.init_state(2), TOKENS)
    tiny.assert_close(logits, expected, 2e-5)
    # Three whole segments: n tokens before the open one, whose tokens follow.
    np.testing.assert_array_equal(state.before, [N, N])
    np.testing.assert_array_equal(state.length, [T % S] * 2)
    start = T // S * S
    np.testing.assert_array_equal(state.tokens[:, : N + T % S], TOKENS[:, start - N :])
    assert not np.any(state.tokens[:, N + T % S :])


@pytest.mark.parametrize("calls", [(4, 4, 7), (1, 7, 7)])
def test_split_invariance(model, expected, calls):
    state, found = model.init_state(2), []
    for count in calls:
        at = sum(x.shape[1] for x in found)
        state, logits = model(state, TOKENS[:, at : at + count])
        found.append(logits)
    tiny.assert_close(np.concatenate(found, axis=1), expected, 2e-5)
    tiny.assert_equal(state, model(model.init_state(2), TOKENS)[0])


def test_zero_reread_has_independent_segments(backbone):
    apart = ReReadWindow(backbone, reread=0, segment=S)
    found = apart(apart.init_state(2), TOKENS)[1]
    tiny.assert_close(found, by_hand(backbone, TOKENS, 0), 2e-5)


def test_state_is_tokens(model):
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.init_state(1)))
    assert sum(x.size * x.dtype.itemsize for x in leaves) == 4 * (N + S) + 8


def test_a_reset_row_starts_a_document(model, expected):
    state, _ = model(model.init_state(2), tiny.tokens(2, 2, 7))
    state = model.reset(state, jnp.array([True, False]))
    _, logits = model(state, TOKENS)
    tiny.assert_close(logits[0], expected[0], 2e-5)
    assert np.abs(np.asarray(logits[1]) - expected[1]).max() > 1e-3


def test_segments_in_groups(model, expected, monkeypatch):
    monkeypatch.setattr("memjax.models.language_model.reread.TOGETHER", 2 * (N + S))
    # A program of its own: the limit is no argument.
    logits = tiny.method(model, "features", model.init_state(2), TOKENS)[1]
    tiny.assert_close(model.logits(logits), expected, 2e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(reread=-1, segment=4), "reread must be at least 0, got -1"),
        (dict(reread=4, segment=0), "segment must be at least 1, got 0"),
        (dict(reread=60, segment=5), r"reread \+ segment must be at most 64.*60 \+ 5"),
    ],
)
def test_sizes_are_checked(backbone, sizes, message):
    with pytest.raises(ValueError, match=message):
        ReReadWindow(backbone, **sizes)
