"""Some of the faults of the table; ``python -m tests.faults`` injects all of them, repeatedly."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.faults.run import result_of
from tests.faults.table import FAULTS

SHORT = {"rank: SIGKILL": "ddp", "disk: directory removed": "tensorflow"}


@pytest.mark.parametrize("name", FAULTS if LONG else SHORT)
def test_nothing_is_lost(name: str) -> None:
    strategy = SHORT.get(name, FAULTS[name].strategies[0])
    with tempfile.TemporaryDirectory() as folder:  # short, as that of a scratch directory must be
        result = result_of(name, strategy, Path(folder), seed=len(name))
    assert not result.problem, result.problem
