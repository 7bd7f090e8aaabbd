"""Stores for the tests of this folder."""

import itertools
from collections.abc import Iterator

import pytest

from tests.buckets import stores
from tests.buckets.stores import Store

_numbers = itertools.count()


@pytest.fixture(name="store", scope="module", params=["gs", "s3"])
def _store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Either store."""
    with stores.google() if request.param == "gs" else stores.amazon() as store:
        yield store


@pytest.fixture(name="url")
def _url(store: Store) -> str:
    """A folder that nothing else uses."""
    return store.url(f"folder-{next(_numbers)}")
