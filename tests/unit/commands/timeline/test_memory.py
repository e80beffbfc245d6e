"""Memory is bounded, whatever the tensor names of a long file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.timeline import events
from hvdtrain.commands.timeline.verdict import analyse
from tests.conftest import ROOT
from tests.timelines import Timeline

KEPT = 1_000  # maximum number of names with a separate row

PEAK = f"""
import sys
from pathlib import Path
from hvdtrain.commands.timeline import events
from hvdtrain.commands.timeline.verdict import analyse
events.MAX_NAMES = {KEPT}
analyse(Path(sys.argv[1]))
# Not ru_maxrss, which includes the memory of the parent process.
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def losses(steps: int) -> Timeline:
    """Return steps of two gradients and a tensor with another name and shape in each step."""
    timeline = Timeline()
    for step in range(steps):
        for index, name in enumerate(("a", "b", f"loss.step.{step}")):
            at = 1_000 * step + 100 * index
            timeline.negotiate(name, at, {0: 0, 1: 5})
            timeline.allreduce([name], at + 10, 50, (step + 1,))
    return timeline


def peak(path: Path) -> int:
    """Return the peak memory in bytes of a separate process that analyses ``path``."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout) * 1024


def test_names_that_do_not_recur_take_bounded_memory(tmp_path: Path) -> None:
    filled = events.KEPT + KEPT  # number of steps after which all samples are full
    short = losses(filled).write(tmp_path, "short.json")
    long = losses(2 * filled).write(tmp_path, "long.json")
    more = long.stat().st_size - short.stat().st_size
    assert peak(long) - peak(short) < more / 8


def test_tensors_beyond_the_limit_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_NAMES", 10)
    monkeypatch.setattr(events, "MAX_SHAPES", 10)
    facts, analysis = analyse(losses(50).write(tmp_path))
    assert len(analysis.tensors) == 10
    assert len(analysis.fusion._sizes) <= 10
    times = {row.name: row.times for row in facts.tensors}
    assert (times["a"], times["b"], times["loss.step.7"]) == (50, 50, 1)
    assert times[events.OTHERS] == 50 - 8
    assert not facts.file.unfamiliar
    assert (facts.steps and facts.steps.seen, facts.lateness.with_ticks) == (50, 3 * 50)
    (row,) = facts.operations
    assert (row.count, row.bytes) == (150, 3 * 4 * sum(range(51)))
