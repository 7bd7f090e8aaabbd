"""Counted n-grams, by hand."""

import numpy as np
import pytest

from experiments.recurrent.ngram import NGram


def test_probabilities_are_witten_bells():
    model = NGram(2, vocab_size=4)
    model.count([[0, 1, 0, 2]])
    # Of 4 tokens 3 differ: p_1(0) = (2 + 3/4) / 7, p_1(1) = p_1(2) = (1 + 3/4) / 7.
    one = np.array([2.75, 1.75, 1.75, 0.75]) / 7
    # Behind 0 came 1 and 2.
    two = (np.array([0, 1, 1, 0]) + 2 * one) / 4
    assert np.isclose(two.sum(), 1)
    np.testing.assert_allclose(model.perplexity([[0, 1]], 2), 1 / two[1])
    np.testing.assert_allclose(model.perplexity([[0, 1]], 1), 1 / one[1])
    # 3 was never seen, and says nothing about what follows.
    np.testing.assert_allclose(
        model.perplexity([[0, 3, 2]], 2), (two[3] * one[2]) ** -0.5
    )


def test_contexts_end_with_their_text():
    joined, apart = NGram(2, 3), NGram(2, 3)
    joined.count([[0, 1, 0, 2]])
    apart.count([[0, 1], [0, 2]])
    text = [[1, 0]]
    assert joined.perplexity(text, 2) < apart.perplexity(text, 2)


def test_an_order_below_one_is_refused():
    with pytest.raises(ValueError, match="order must be at least 1, got 0"):
        NGram(0, 4)
