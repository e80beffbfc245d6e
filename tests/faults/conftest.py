"""The fixtures of the tests with real ranks: faults are injected into such."""

from tests.parallel.conftest import pytest_collection_modifyitems, started

__all__ = ["pytest_collection_modifyitems", "started"]
