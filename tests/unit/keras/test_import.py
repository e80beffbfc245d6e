"""What ``import hvdtrain.keras`` says where it cannot be used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import environment

WITHOUT_TENSORFLOW = "import sys; sys.modules['tensorflow'] = None; import hvdtrain.keras"


@pytest.mark.parametrize(
    ("backend", "line"),
    [
        ("jax", "KERAS_BACKEND=jax: hvdtrain.keras is for Keras on TensorFlow; unset the variable"),
        ("tensorflow", "hvdtrain.keras needs TensorFlow: pip install 'hvdtrain[tensorflow]'"),
    ],
)
def test_one_line_says_what_is_missing(backend: str, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW],
        env=environment(KERAS_BACKEND=backend),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"hvdtrain.errors.UsageError: {line}"
