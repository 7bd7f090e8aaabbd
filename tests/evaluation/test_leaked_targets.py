"""What is scored of segments, and how far back searches go: against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import evaluation
from memjax.evaluation import TokenLosses
from memjax.mechanisms import AttentionConfig
from memjax.models import HMTConfig, LanguageModel, ModelConfig, add_hmt
from tests import tiny

V, L, N = 11, 4, 3
BACKBONE = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=16),),
    num_layers=1,
    vocab_size=V,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
CONFIG = HMTConfig(
    segment_length=L, num_sensory_tokens=1, num_memories=N, summary_fraction=0.75
)
TOKENS = np.random.default_rng(0).integers(0, V, 6 * L + 1).astype(np.int32)


@functools.cache
def model():
    key = jax.random.key(0)
    return tiny.drawn(
        lambda: add_hmt(LanguageModel(BACKBONE, key=key), CONFIG, key=key)
    )


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_targets_count_by_their_place_in_their_segment(first):
    length = 11
    mask = evaluation.scored_mask(length, L, first)
    for target in range(length):
        token = target + 1
        assert mask[target] == (token - token // L * L >= first)


@pytest.mark.slow
def test_scored_targets_are_not_leaked():
    """Changing a token changes nothing that it, or one before it, is scored from."""
    mask = evaluation.scored_mask(6 * L, L, CONFIG.summary)
    state = model().init_state(1)

    def read(tokens):
        return tiny.method(model(), "features", state, tokens[None])[1][0]

    def features(tokens):
        return np.asarray(read(tokens))

    before = features(TOKENS[:-1])
    leaks = 0
    for at in range(1, 6 * L):
        changed = TOKENS[:-1].copy()
        changed[at] = (changed[at] + 1) % V
        # Target `at - 1` is this token; its features are those of the token before.
        moved = np.any(features(changed)[:at] != before[:at], axis=1)
        assert not np.any(moved & (mask[:at] > 0))
        leaks += np.sum(moved)
    assert leaks > 0, "the others are left out for a reason"


def test_masking_leaves_other_targets_out():
    nll = np.arange(6, dtype=np.float32).reshape(2, 3)
    mask = np.array([[1, 1, 1], [1, 0, 0]], np.float32)
    whole = TokenLosses(nll, mask, ("a", "b"), ("one", "two"))
    some = evaluation.mask_losses(whole, np.array([0, 1, 1], np.float32))
    assert evaluation.perplexity(some) == pytest.approx(np.exp((1 + 2) / 2))
    rows = evaluation.mask_losses(whole, np.array([[0, 0, 1], [1, 1, 1]], np.float32))
    assert evaluation.perplexity(rows) == pytest.approx(np.exp((2 + 3) / 2))
    with pytest.raises(ValueError, match=r"mask must be \(3,\) or \(2, 3\)"):
        evaluation.mask_losses(whole, np.ones(2, np.float32))


@pytest.mark.slow
def test_distances_are_those_of_the_memories_searched():
    """The heaviest weight of each segment, found over a list of memories by hand."""
    state = model().init_state(1)
    tokens = jnp.asarray(TOKENS[None, : 5 * L + 2])
    *_, trace = tiny.method(model(), "trace", state, tokens)
    distances, held = evaluation.recall_distances(
        trace.scores, trace.num_valid, trace.length
    )
    assert held.tolist() == [1, 2, 3, 3, 3]
    query, key = (
        np.asarray(w.get_value(), np.float64) for w in (model().query, model().key)
    )
    memories = [np.asarray(m[0], np.float64) for m in trace.memory]
    expected = []
    for n in range(1, 6):
        first = max(0, n - N)
        summary = np.asarray(trace.summary[n, 0], np.float64)
        weights = [(summary @ query) @ (memories[m] @ key) for m in range(first, n)]
        expected.append(n - (first + int(np.argmax(weights))))
    assert distances.tolist() == expected


def test_rows_without_memories_or_tokens_make_no_search():
    scores = np.array([[[0, 0, 0]], [[0, 0, 1]], [[0.2, 0.5, 0.3]], [[0, 1, 0]]])
    held, tokens = np.array([[0], [1], [3], [3]]), np.array([[4], [4], [2], [0]])
    distances, count = evaluation.recall_distances(scores, held, tokens)
    assert distances.tolist() == [1, 2] and count.tolist() == [1, 3]
    # All weights of the memories held are zero: still one of them.
    distances, _ = evaluation.recall_distances(
        np.zeros((1, 1, 3)), np.array([[2]]), np.array([[4]])
    )
    assert distances.tolist() == [2]
    with pytest.raises(ValueError, match=r"held must be in \[0, 3\]"):
        evaluation.recall_distances(scores, held + 1, tokens)


def test_recall_summary_compares_with_chance():
    summary = evaluation.recall_summary(np.array([1, 2, 3, 2]), np.array([1, 2, 4, 4]))
    assert summary["searches"] == 4
    assert summary["previous"] == 1 / 4 and summary["within_2"] == 3 / 4
    assert summary["chance_previous"] == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 4) / 4)
    assert summary["chance_within_2"] == pytest.approx((1 + 1 + 1 / 2 + 1 / 2) / 4)
    assert summary["even"] == pytest.approx(2 / 3)
    assert summary["chance_even"] == pytest.approx(1 / 2)
    none = np.zeros(0, np.int64)
    assert np.isnan(evaluation.recall_summary(none, none)["previous"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 4, 0), "length must be at least 0"),
        ((4, 0, 0), "segment must be at least 1"),
        ((4, 4, 5), r"first must be in \[0, 4\], got 5"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        evaluation.scored_mask(*sizes)
