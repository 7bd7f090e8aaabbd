"""Interleaved and dilated texts: every token once, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data import FILLER, TokenisedDocument, dilate, interleave


def document(length, start, kind="book"):
    """Tokens that are all different, so that an order can be checked."""
    tokens = np.arange(start, start + length, dtype=np.int32)
    return TokenisedDocument(f"{kind} {start}", kind, tokens)


def by_hand(a, b, chunk):
    """The construction as a loop over pieces."""
    parts, a, b = [], list(a), list(b)
    while a and b:
        parts += a[:chunk] + b[:chunk]
        a, b = a[chunk:], b[chunk:]
    return parts + a + b


@given(lengths=st.tuples(*[st.integers(1, 30)] * 2), chunk=st.integers(1, 12))
def test_interleaved_documents_can_be_separated(lengths, chunk):
    pair = document(lengths[0], 0), document(lengths[1], 100, "code")
    (text,) = interleave(pair, chunk)
    expected = by_hand(pair[0].tokens, pair[1].tokens, chunk)
    assert np.asarray(text.document.tokens).tolist() == expected
    assert text.document.tokens.dtype == np.int32
    assert (text.document.name, text.document.kind) == (
        "book 0 + code 100",
        "book+code",
    )
    for number, part in enumerate(pair):
        apart = text.document.tokens[text.origin == number]
        np.testing.assert_array_equal(apart, part.tokens)


def test_switches_come_every_chunk():
    (text,) = interleave([document(9, 0), document(5, 100)], 3)
    assert text.origin.tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 2 + [0] * 3


def test_odd_document_is_unchanged():
    documents = [document(4, 0), document(4, 10), document(4, 20)]
    pair, alone = interleave(documents, 2)
    assert pair.document.kind == "book" and len(pair.document.tokens) == 8
    assert alone.document is documents[2] and not alone.origin.any()


@given(length=st.integers(1, 30), chunk=st.integers(1, 12))
def test_filler_follows_every_whole_chunk(length, chunk):
    part = document(length, 0)
    (text,) = dilate([part], 999, chunk)
    expected = []
    for start in range(0, length, chunk):
        piece = part.tokens[start : start + chunk].tolist()
        expected += piece + ([999] * chunk if len(piece) == chunk else [])
    assert np.asarray(text.document.tokens).tolist() == expected
    assert text.document.tokens.dtype == np.int32
    kept = text.origin != FILLER
    np.testing.assert_array_equal(text.document.tokens[kept], part.tokens)
    assert set(text.document.tokens[~kept].tolist()) <= {999}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interleave([document(3, 0)], 0), "chunk must be at least 1, got 0"),
        (lambda: interleave([]), "documents must hold at least one"),
        (lambda: dilate([], 3), "documents must hold at least one"),
        (lambda: dilate([document(3, 0)], -1), "filler must be at least 0"),
        (lambda: dilate([document(3, 0)], 1, -2), "chunk must be at least 1, got -2"),
    ],
)
def test_bad_tasks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
