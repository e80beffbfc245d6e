"""What a person sees who sits at a terminal while ranks start and train."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, on_demand, run
from tests.parallel.conftest import FRAMEWORKS
from tests.terminal import record, screen

MPIRUN = (str(BIN / "mpirun"), "--oversubscribe", "-n", "2")
LAUNCH = (str(BIN / "hvdtrain"), "launch", "-n", "2", "--")
TRAIN = (sys.executable, "-m", "hvdtrain.mnist", "--epochs", "1", "--precision", "fp64")

# PyTorch as on a slow disk: no thread of Python runs while its libraries are loaded.
SLOW = """
import ctypes, sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            ctypes.PyDLL(None).sleep(5)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    "start", [pytest.param(MPIRUN, id="mpirun", marks=on_demand), pytest.param(LAUNCH, id="launch")]
)
def test_signs_of_life_come_while_ranks_start_and_train(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    # An epoch of hundreds of steps takes seconds, however fast the machine.
    line = (*start, *TRAIN, "--batch-size", "2")
    seen = record(line, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert seen.code == 0, seen.text
    headline = "2 ranks on 1 host"
    loading = seen.arrivals("hvdtrain mnist on 2 ranks: importing pytorch", headline)
    frames = seen.arrivals("images/s", "epoch 1 done")
    for times in (loading, frames):
        assert len(times) >= 4, seen.text
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.median(gaps) < 2, gaps
    rows = screen(seen.text)
    assert not any("importing" in row for row in rows)
    assert sum("images/s" in row and "━" in row for row in rows) == 1  # the last frame
    assert any(row.startswith("epoch 1 done: loss") for row in rows)


def test_an_error_while_ranks_start_stands_on_a_line_of_its_own() -> None:
    seen = record((*MPIRUN, *TRAIN, "--data", "/nowhere"))
    rows = screen(seen.text)
    assert "hvdtrain: error: --data /nowhere: no such directory" in rows, seen.text


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_imported_that_the_run_does_not_use(framework: str) -> None:
    program = (
        "import json, sys\nfrom hvdtrain import mnist\nassert mnist.main() == 0\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    options = ["--num-steps", "1", "--quiet", "--framework", framework]
    outcome = run([sys.executable, "-c", program, *options])
    assert outcome.code == 0, outcome.err
    loaded = set(json.loads(outcome.out.splitlines()[-1]))
    useless = {"matplotlib", "sklearn", "torchvision", "tensorboard", "yaml"}
    # Keras itself asks whether SciPy is there.
    useless |= {"torch"} if framework == "tensorflow" else {"tensorflow", "scipy"}
    assert loaded & useless == set()
