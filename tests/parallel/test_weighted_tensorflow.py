"""``weight_loss`` in TensorFlow: losses that are means over tokens, whose counts differ by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.conftest import run_script


@pytest.mark.parametrize(
    ("strategy", "number"),
    [("single", 1), *((name, number) for name in ("horovod", "mpi") for number in (1, 2, 3))],
)
def test_loops_weighted_by_tokens_equal_one_process(
    strategy: str, number: int, tmp_path: Path
) -> None:
    """Eager and traced, accumulated by Keras, with a loss scale; parts of nothing but padding."""
    script = "weighted_tensorflow.py"
    run_script(number, script, strategy, str(tmp_path), folder=tmp_path, framework="tensorflow")
