"""Counted n-grams, by hand."""

import numpy as np
import pytest

from experiments.lab.baselines import NGram
from memjax.data import TokenisedDocument


def text(*tokens):
    return TokenisedDocument("name", "kind", np.array(tokens, np.int32))


def test_probabilities_are_witten_bells():
    model = NGram([text(0, 1, 0, 1, 1)], order=2, vocab_size=4)
    # One token of 1: (3 + 2/4) / (5 + 2). After 0 always 1: (2 + 1 * p(1)) / (2 + 1).
    one = (3 + 2 / 4) / 7
    assert model.probability((), 1) == pytest.approx(one)
    assert model.probability((0,), 1) == pytest.approx((2 + one) / 3)
    assert model.probability((3,), 1) == pytest.approx(one)
    assert sum(model.probability((1,), x) for x in range(4)) == pytest.approx(1)
    losses = model.losses([text(0, 1), text(0, 1, 0)])
    np.testing.assert_allclose(losses.mask, [[1, 0], [1, 1]])
    assert losses.nll[0, 0] == pytest.approx(-np.log((2 + one) / 3))
    assert losses.nll[1, 1] == pytest.approx(-np.log(model.probability((1,), 0)))


def test_contexts_end_with_their_text():
    joined = NGram([text(0, 1, 0, 2)], 2, 3)
    apart = NGram([text(0, 1), text(0, 2)], 2, 3)
    assert joined.probability((1,), 0) > apart.probability((1,), 0)
