"""Memory is bounded, whatever the tensor names of a long file; the statistics of streams."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.timeline import events
from hvdtrain.commands.timeline.analyse import BINS, StateHistory
from hvdtrain.commands.timeline.events import KEPT as KEPT_VALUES
from hvdtrain.commands.timeline.events import Sample
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
    filled = KEPT_VALUES + KEPT  # number of steps after which all samples are full
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


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_a_short_sample_is_exact(values: list[float]) -> None:
    sample = Sample()
    for value in values:
        sample.add(value)
    assert sample.count == len(values)
    assert sample.total == pytest.approx(sum(values))
    assert sample.mean == pytest.approx(statistics.fmean(values))
    assert sample.median == statistics.median(values)
    assert sample.maximum == max(values)
    assert sample.quantile(0) == min(values)


def test_statistics_of_no_values_are_zero() -> None:
    sample = Sample()
    assert (sample.mean, sample.median, sample.quantile(0.5), sample.maximum) == (0, 0, 0, 0)


def test_a_long_sample_keeps_an_even_selection() -> None:
    sample = Sample()
    count = 5 * KEPT_VALUES + 7
    for value in range(count):
        sample.add(value)
    assert sample.count == count
    assert sample.total == count * (count - 1) / 2
    assert sample.median == pytest.approx(count / 2, rel=1e-3)
    assert sample.quantile(0.25) == pytest.approx(count / 4, rel=1e-3)
    assert len(sample._kept) <= KEPT_VALUES
    assert list(sample._kept) == list(range(0, count, sample._every))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100_000)), min_size=1, max_size=200))
def test_the_state_history_is_exact(stretches: list[tuple[int, int]]) -> None:
    history, sums, now = StateHistory(3), [0.0, 0.0, 0.0], 0
    for state, length in stretches:
        if now + length >= history.border:
            history.extend(sums, state, now, now + length)
        sums[state] += length
        now += length
    columns = history.columns(sums)
    assert len(columns[0]) <= BINS + 1
    assert [sum(column) for column in columns] == pytest.approx(sums)
    # Each stretch against the definition.
    for index in range(len(columns[0])):
        low, high = index * history.width, (index + 1) * history.width
        expected, start = [0.0, 0.0, 0.0], 0
        for state, length in stretches:
            expected[state] += max(0.0, min(high, start + length) - max(low, start))
            start += length
        assert [column[index] for column in columns] == pytest.approx(expected)
