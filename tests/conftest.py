"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The rank processes; see :mod:`rank_pool`."""
    pool = RankPool()
    yield pool
    pool.close()
