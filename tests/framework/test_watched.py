"""A script that ``hvdtrain verify --script`` watches does what it does unwatched."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import run

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_watched_script_does_the_same(framework: str, tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / f"watched_{framework}.py", tmp_path / "script.py")
    plain = run([sys.executable, "script.py"], cwd=tmp_path)
    assert plain.code == 0, plain.err[-3000:]
    records = tmp_path / "records"
    records.mkdir()
    command = [sys.executable, "-m", "hvdtrain.commands.verify.script", "--folder", str(records)]
    watched = run([*command, "script.py"], cwd=tmp_path)
    assert (watched.code, watched.out) == (0, plain.out), watched.err[-3000:]
    record = json.loads((records / "0.json").read_text())
    assert record["done"] >= 2
    if framework == "pytorch":
        assert record["written"] == [str(tmp_path / "model.pt")]
        assert record["sample_weights"][0] == 0.5 / 8
