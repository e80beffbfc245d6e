"""Fixtures of the tests with several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import slurm
from tests.cluster.slurm import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A private Slurm, stopped at the end with all its processes."""
    if reason := slurm.lacks():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
