"""The output on a terminal while ranks start and train."""

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
def test_progress_is_shown_while_ranks_start_and_train(
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


def test_an_error_while_ranks_start_is_on_a_separate_line() -> None:
    seen = record((*MPIRUN, *TRAIN, "--data", "/nowhere"))
    rows = screen(seen.text)
    assert "hvdtrain: error: --data /nowhere: no such directory" in rows, seen.text


# Ctrl-C

NOTHING = "hvdtrain: interrupted; nothing was saved (no --checkpoint-dir)"
TOO_EARLY = "hvdtrain: SIGINT: stopped before its first step: there is no checkpoint yet"
SMALL = (*TRAIN[:3], "--model", "small", "--epochs", "900")


@pytest.mark.parametrize(
    ("interrupt", "options", "code", "last"),
    [
        ("importing", [], 130, NOTHING),
        ("epoch 2", [], 130, NOTHING),
        ("importing", ["--checkpoint-dir"], 130, TOO_EARLY),
        ("epoch 2", ["--checkpoint-dir"], 75, "hvdtrain: SIGINT: stopped after step "),
    ],
)
def test_ctrl_c_ends_a_launched_training_in_one_line(
    interrupt: str, options: list[str], code: int, last: str, tmp_path: Path
) -> None:
    options = [f"{name}={tmp_path / 'saved'}" for name in options]
    seen = record((*LAUNCH, *SMALL, *options), columns=80, interrupt=[interrupt])
    rows = screen(seen.text)
    lines = [row for row in rows if "hvdtrain: " in row]
    assert seen.code == code, seen.text
    assert [line[: len(last)] for line in lines] == [last], rows
    assert "━" not in "".join(lines), rows  # of the bar
    assert not any("prterun" in row or "SIGUSR1" in row for row in rows), rows


def test_ctrl_c_at_a_bare_mpirun_is_reported() -> None:
    seen = record((*MPIRUN, *SMALL), columns=80, interrupt=["epoch 2"])
    assert seen.code != 0
    rows = [row for row in screen(seen.text) if row]
    assert rows[-1] == "hvdtrain: SIGTERM: stopped; nothing was saved (no --checkpoint-dir)", rows


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ((*TRAIN, "--framework", "pytorhc"), 2, "hvdtrain: error: --framework: 'pytorhc'"),
        ((sys.executable, "nosuch.py"), 2, "can't open file"),
        ((sys.executable, "-c", "raise ValueError('mine')"), 1, "ValueError: mine"),
    ],
)
def test_mpiruns_message_about_a_reported_error_is_hidden(
    words: tuple[str, ...], code: int, error: str
) -> None:
    seen = record((*LAUNCH, *words), columns=80)
    assert seen.code == code
    assert "prterun" not in seen.text, seen.text
    assert error in screen(seen.text)[-2] or error in seen.text


def test_help_behind_launch_is_printed_once() -> None:
    outcome = run([*LAUNCH, *TRAIN, "--help"], code=0)
    assert outcome.out.count("usage: ") == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_imported_that_the_run_does_not_use(framework: str) -> None:
    program = (
        "import json, sys\nfrom hvdtrain import mnist\nassert mnist.main() == 0\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    options = ["--num-steps", "1", "--quiet", "--framework", framework]
    outcome = run([sys.executable, "-c", program, *options], code=0)
    loaded = set(json.loads(outcome.out.splitlines()[-1]))
    useless = {"matplotlib", "sklearn", "torchvision", "tensorboard", "yaml"}
    # Keras itself asks whether SciPy is there.
    useless |= {"torch"} if framework == "tensorflow" else {"tensorflow", "scipy"}
    assert loaded & useless == set()
