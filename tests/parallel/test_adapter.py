"""Each step of the adapters on real ranks, against closed forms of rank and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ranks
from tests.parallel.conftest import FRAMEWORKS

STEPS = Path(__file__).parent / "scripts" / "steps.py"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_steps(framework: str, number: int, tmp_path: Path) -> None:
    outcome = ranks(number, str(STEPS), framework, str(tmp_path))
    assert outcome.code == 0, outcome.err[-3000:]
    done = sorted(path.name for path in tmp_path.iterdir())
    assert done == [f"{rank}-of-{number}" for rank in range(number)]
