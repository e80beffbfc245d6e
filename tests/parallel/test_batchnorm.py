"""BatchNorm on real ranks: of the global batch, and the mean of the ranks' statistics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.conftest import run_script


@pytest.mark.parametrize(("strategy", "number"), [("ddp", 1), ("ddp", 2), ("horovod", 3)])
def test_each_kind_equals_long_doubles(strategy: str, number: int, tmp_path: Path) -> None:
    """Also with a mean of 10,000 standard deviations; then a loop with a sampler of its own."""
    run_script(number, "norms.py", strategy, str(tmp_path), folder=tmp_path)
