"""Faults at random moments: two in CI, all of them five times with HVDTRAIN_LONG=1.

``-s`` prints a line for each: seconds until the job was over or saved again, exit code, updates
that had been saved and were lost, what was left behind, and the line of hvdtrain.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.faults.run import survive
from tests.faults.table import FAULTS

SHORT = {"rank: SIGKILL": "ddp", "disk: directory removed": "tensorflow"}
CASES = [  # each time by another strategy
    (name, FAULTS[name].strategies[(number + time) % len(FAULTS[name].strategies)], time)
    for time in range(5)
    for number, name in enumerate(FAULTS)
]


@pytest.mark.parametrize(
    ("name", "strategy", "time"),
    CASES if LONG else [(name, strategy, 0) for name, strategy in SHORT.items()],
)
def test_nothing_is_lost(name: str, strategy: str, time: int) -> None:
    with tempfile.TemporaryDirectory() as folder:  # short, as that of a scratch directory must be
        print(f"\n{survive(name, strategy, Path(folder), seed=1000 * time + len(name))}")
