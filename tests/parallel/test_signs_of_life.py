"""What a person sees who waits: something new every second or two, whatever works and however long.

How many seconds were shown is counted, not how fast: what waits sleeps for a time that is known.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, on_demand
from tests.terminal import Recording, record, screen

HVDTRAIN = str(BIN / "hvdtrain")
GRADE = f"{ROOT}/homework/grade.py SLOW"
# A training that takes its time: it says that it has begun, and leaves a summary.
SLOW = """
import json, sys, time
print("epoch 1  step 1/2", flush=True)
time.sleep(4)
for word in sys.argv:
    if word.startswith("--summary="):
        content = {"images_per_second_mean": 10.0, "world_size": 1, "hosts": 1, "workload": "slow"}
        with open(word.partition("=")[2], "w") as file:
            json.dump(content | {"stopped": "steps", "steps_completed": 2}, file)
"""
# PyTorch as on a slow disk, in the ranks that verify.
IMPORTS = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "hvdtrain.commands.verify.ranks" in sys.orig_argv:
            time.sleep(3)
sys.meta_path.insert(0, Slow())
"""


def shown(seen: Recording, text: str) -> set[str]:
    """The seconds that were shown behind ``text``."""
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "\n", seen.text)
    return set(re.findall(rf"{text}.* \.\.\. (\d+) s", plain))


@pytest.fixture
def slow(tmp_path: Path) -> str:
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    (tmp_path / "sitecustomize.py").write_text(IMPORTS)
    return str(path)


SCRIPT = r"slow\.py runs on 2 ranks, then on 1"
OUT = "--repeat=1 --out=OUT"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (f"scaling --ranks=1 {OUT} -- python SLOW", "1 rank: epoch 1 step 1/2"),
        (
            f"compare --strategies=single {OUT} -- python SLOW --batch-size=4",
            "single pytorch, 1 rank: epoch 1 step 1/2",
        ),
        pytest.param("verify -n 1", "starting 1 rank and pytorch", marks=on_demand),
        pytest.param("verify -n 2 --script SLOW", SCRIPT, marks=on_demand),
        pytest.param("doctor -n 2", "timing allreduce on 2 ranks", marks=on_demand),
        (GRADE, SCRIPT),
    ],
)
def test_a_command_shows_that_it_works(words: str, text: str, slow: str, tmp_path: Path) -> None:
    line = words.replace("OUT", str(tmp_path / "out")).replace("SLOW", slow).split()
    program = [sys.executable] if words == GRADE else [HVDTRAIN]
    seen = record([*program, *line], columns=80, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert seen.code == (words == GRADE), seen.text
    assert len(shown(seen, text)) >= 3, seen.text
    rows = screen(seen.text)
    assert not any(re.search(r" \.\.\. \d+ s$", row) for row in rows), rows  # it is gone


# Each update takes three seconds, and each of the two batches of an evaluation one.
SLOW_TASK = """
import time
import torch
from examples import own_task

Options = own_task.Options

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(3 if self.training else 1)
        return super().forward(x)

def task(options):
    made = own_task.task(options)
    made.model[0] = Slow(10, options.hidden)
    return own_task.TorchTask(
        made.model,
        options,
        made.train,
        made.test,
        losses=own_task.squared_error,
        metrics=made.metrics,
    )
"""


def test_a_slow_step_and_a_slow_evaluation_show_that_they_go_on(tmp_path: Path) -> None:
    path = tmp_path / "slow_task.py"
    path.write_text(SLOW_TASK)
    options = ("--num-steps", "1", "--batch-size", "12", "--strategy", "single")
    seen = record((sys.executable, "-m", "hvdtrain.train", str(path), *options), columns=80)
    assert seen.code == 0, seen.text
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", seen.text)
    in_step = set(re.findall(r"step 0/1  loss -  - samples/s  (\d:\d\d)  - left", plain))
    assert len(in_step) >= 3, plain  # of 0:00 to 0:03
    evaluating = re.findall(r"evaluating [━╺╸]+ (\d+)/89 samples  \d:\d\d  (\S+) left", plain)
    assert evaluating[0] == ("0", "-"), plain
    assert any(done == "48" and left != "-" for done, left in evaluating), plain
    bars = [row for row in screen(seen.text) if "━" in row and "┏" not in row]
    assert len(bars) == 1 and "step 1/1" in bars[0], bars


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("verify -n 2", "starting 2 ranks"),
        ("doctor -n 2", "timing allreduce on 2 ranks"),
        ("scaling --ranks=1,2 --out=OUT -- python SLOW", "epoch 1 step"),
    ],
)
def test_ctrl_c_ends_a_command_in_one_line(words: str, due: str, slow: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    line = words.replace("OUT", out).replace("SLOW", slow).split()
    seen = record([HVDTRAIN, *line], columns=200, interrupt=[due])
    said = [row for row in screen(seen.text) if row and "mpirun" not in row and row[0] != "["]
    kept = f"completed runs are kept in {out}: run the same command again to continue"
    expected = [kept] * ("OUT" in words) + ["hvdtrain: error: interrupted"]
    assert (seen.code, said) == (130, expected), seen.text
