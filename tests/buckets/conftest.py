"""Stores for the tests of this folder."""

import itertools
from collections.abc import Iterator

import pytest

from tests.buckets import stores
from tests.buckets.stores import Store

_numbers = itertools.count()


# Once a process: libraries keep connections to the first address that they were given.
@pytest.fixture(name="gs", scope="session")
def _gs() -> Iterator[Store]:
    with stores.google() as store:
        yield store


@pytest.fixture(name="s3", scope="session")
def _s3() -> Iterator[Store]:
    with stores.amazon() as store:
        yield store


@pytest.fixture(name="store", params=["gs", "s3"])
def _store(request: pytest.FixtureRequest) -> Store:
    """Either store."""
    return request.getfixturevalue(request.param)


@pytest.fixture(name="url")
def _url(store: Store) -> str:
    """A folder that nothing else uses."""
    return store.url(f"folder-{next(_numbers)}")
