"""Scores of `memjax eval`: null for what no text has, and no column twice."""

import json

import numpy as np
import pytest

from memjax.evaluation import TokenLosses, report


def losses(scored, kinds=("a", "b")):
    nll = np.full((2, 4), np.log(8), np.float32)
    mask = (np.arange(4) < np.array(scored)[:, None]).astype(np.float32)
    return TokenLosses(nll * mask, mask, kinds, ("d", "e"))


def test_what_no_text_is_long_enough_for_is_null():
    whole = losses((4, 2))
    rows = report.perplexities(whole, whole, window=3)
    assert rows["a"].keys() == {"perplexity", "beyond_window"}
    assert rows["b"]["beyond_window"] is None and rows["a"]["beyond_window"]
    assert report.columns(rows) == ["perplexity", "beyond_window"]
    short = report.perplexities(whole, whole, window=4)
    assert report.columns(short) == ["perplexity"]
    assert "null" in json.dumps(short, allow_nan=False)


def test_all_targets_are_told_where_some_do_not_count():
    rows = report.perplexities(losses((2, 2)), losses((4, 2)), window=4)
    assert report.columns(rows) == ["perplexity", "all_targets"]
    assert rows["all"]["all_targets"] == pytest.approx(8)
