"""Means, standard errors and intervals against numbers worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from memjax.evaluation import TokenLosses
from memjax.evaluation.statistics import (
    LossDifference,
    interval,
    loss_difference_by_document,
    mean_loss_difference,
    paired,
    standard_error,
)


def test_standard_error_is_by_n_minus_one():
    # Deviations -1, 0, 1: variance 2 / 2, over three values.
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(standard_error([1.0])) and math.isnan(standard_error([]))


def test_interval_is_student_t():
    mean, low, high = interval([1.0, 2.0, 3.0])
    # Quantile 0.975 with two degrees of freedom: 4.3027.
    assert mean == 2 and high - mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    with pytest.raises(ValueError, match="values must hold at least one"):
        interval([])


def test_interval_of_one_value_is_unknown():
    found = interval([5.0])
    assert found.mean == 5 and math.isnan(found.low) and not found.excludes_zero


def test_pairing_cancels_what_texts_have_in_common():
    hard = np.asarray([1.0, 5.0, 9.0, 2.0])
    saved = np.asarray([0.1, 0.12, 0.08, 0.1])
    found = paired(hard, hard - saved)
    assert found.mean == pytest.approx(0.1) and found.excludes_zero
    assert paired(hard - saved, hard).high < 0
    with pytest.raises(ValueError, match="as many, got 4 and 3"):
        paired(hard.tolist(), hard[:3].tolist())


def test_interval_of_pairs_is_that_of_the_t_test():
    base, other = np.random.default_rng(0).normal(size=(2, 7))
    low, high = stats.ttest_rel(base, other).confidence_interval()
    expected = ((base - other).mean(), low, high)
    np.testing.assert_allclose(paired(base, other), expected)


def losses(saved, targets, kinds=None, texts=1):
    """Losses of a base and of a model that saves `saved` nats a token in a document."""
    count = len(saved)
    kinds = kinds or ("book",) * count
    width = max(targets)
    mask = (np.arange(width) < np.asarray(targets)[:, None]).astype(np.float32)
    nll = np.random.default_rng(1).uniform(1, 5, mask.shape).astype(np.float32) * mask
    names = tuple(f"document {i}" for i in range(count))
    nll, mask = (np.repeat(x, texts, axis=0) for x in (nll, mask))

    def many(x):
        return tuple(name for name in x for _ in range(texts))

    base = TokenLosses(nll, mask, many(kinds), many(names))
    less = np.repeat(np.asarray(saved, np.float32)[:, None], texts, axis=0)
    return base, base._replace(nll=(base.nll - less * base.mask))


def test_difference_is_the_mean_over_targets_with_error_over_documents():
    saved = np.random.default_rng(0).normal(0.1, 0.05, 40)
    found = loss_difference_by_document(*losses(saved, [10] * 40))
    assert found.nats == pytest.approx(saved.mean(), rel=1e-4)
    # Equal documents: the bootstrap and Student's t tell the same.
    student = interval(saved)
    assert found.standard_error == pytest.approx(standard_error(saved), rel=0.05)
    assert found.low == pytest.approx(student.low, abs=0.004)
    assert found.high == pytest.approx(student.high, abs=0.004)
    assert found.documents == 40 and found.excludes_zero


def test_interval_of_few_documents_is_as_wide_as_students():
    saved = [0.3, -0.1, 0.2, 0.05, 0.1, 0.0]
    found, student = (
        loss_difference_by_document(*losses(saved, [7] * 6)),
        interval(saved),
    )
    assert found.high - found.low == pytest.approx(student.high - student.low, rel=0.2)
    assert not found.excludes_zero


def test_long_documents_count_for_more():
    base, model = losses([1.0, 0, 0, 0, 0], [6, 1, 1, 1, 1])
    assert loss_difference_by_document(base, model).nats == pytest.approx(0.6, rel=1e-5)
    assert mean_loss_difference(base, model) == pytest.approx(0.6, rel=1e-5)


def test_texts_of_one_document_are_no_more_evidence_than_one():
    saved, targets = [0.3, -0.1, 0.2, 0.05, 0.1, 0.0], [9] * 6
    once = loss_difference_by_document(*losses(saved, targets))
    cut = loss_difference_by_document(*losses(saved, targets, texts=50))
    np.testing.assert_allclose(cut, once, rtol=1e-4, atol=1e-6)


def test_documents_are_drawn_within_their_kind():
    # Kinds differ, their documents do not: nothing is unsure.
    kinds = ("book",) * 5 + ("code",) * 5
    base, model = losses([1.0] * 5 + [0.0] * 5, [4] * 10, kinds)
    assert loss_difference_by_document(base, model).standard_error == pytest.approx(
        0, abs=1e-6
    )


def test_the_same_seed_gives_the_same_interval():
    base, model = losses([0.3, -0.1, 0.2, 0.05, 0.1], [3, 4, 5, 6, 7])
    assert loss_difference_by_document(base, model) == loss_difference_by_document(
        base, model
    )
    assert loss_difference_by_document(
        base, model, seed=1
    ) != loss_difference_by_document(base, model)


def test_too_few_documents_are_refused_by_kind():
    kinds = ("book",) * 5 + ("code",) * 4
    base, model = losses([0.1] * 9, [3] * 9, kinds)
    with pytest.raises(ValueError, match="at least 5 documents.*got 4 of 'code'"):
        loss_difference_by_document(base, model)
    assert mean_loss_difference(base, model) == pytest.approx(0.1, rel=1e-4)


def test_losses_of_other_targets_are_refused():
    base, model = losses([0.1] * 5, [3] * 5)
    for other in (
        model._replace(mask=model.mask[:, ::-1].copy() * 0),
        model._replace(documents=model.documents[::-1]),
    ):
        with pytest.raises(ValueError, match="losses of the same targets"):
            loss_difference_by_document(base, other)
    none = base._replace(mask=base.mask * 0)
    with pytest.raises(ValueError, match="must have targets"):
        loss_difference_by_document(none, none)
    assert math.isnan(mean_loss_difference(none, none))


def test_an_interval_across_zero_does_not_exclude_it():
    assert LossDifference(-1, -2, -0.5, 0.1, 5).excludes_zero
    assert not LossDifference(0.1, -0.1, 0.3, 0.1, 5).excludes_zero
