"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool
from slurm_cluster import SlurmCluster, why_not


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The rank processes; see :mod:`rank_pool`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM of two nodes; see :mod:`slurm_cluster`."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster() as cluster:
        yield cluster
