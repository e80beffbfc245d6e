"""Pi by Monte Carlo: the hit condition, the grid's bias, streams and digits."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain import pi
from hvdtrain.errors import UsageError
from hvdtrain.pi import (
    BLOCK,
    SIDE,
    PiEstimate,
    build_parser,
    count_hits,
    count_hits_naive,
    estimate,
    report,
)
from tests.conftest import ROOT
from tests.terminal import record, screen


def last_hit(column: int) -> int:
    """Return the last row of ``column`` whose cell's center is in the circle, or -1; exact.

    (k + 1/2)^2 + (l + 1/2)^2 < S^2, times four: (2 l + 1)^2 <= 4 S^2 - (2 k + 1)^2 - 1.
    """
    return (math.isqrt(4 * SIDE**2 - (2 * column + 1) ** 2 - 1) + 1) // 2 - 1


def test_the_bias_of_the_grid_is_as_documented() -> None:
    inside = sum(last_hit(column) + 1 for column in range(SIDE))
    bias = 4 * inside / SIDE**2 - math.pi
    assert bias == pytest.approx(4.7e-8, abs=0.05e-8)
    assert bias < 2.4e-5 / 400  # the standard error of 5e9 points


def raw_of(x: Any, y: Any) -> NDArray[np.uint64]:
    """Return the generator's output for these points: whole blocks."""
    columns, rows = (np.asarray(v, np.uint16).reshape(-1, BLOCK) for v in (x, y))
    return np.concatenate([columns, rows], axis=1).ravel().view(np.uint64)


def throw(monkeypatch: pytest.MonkeyPatch, x: Any, y: Any, samples: int) -> int:
    raw = raw_of(x, y)
    used = 0

    class Rigged:
        def __init__(self, stream: object) -> None:
            pass

        def random_raw(self, size: int) -> NDArray[np.uint64]:
            nonlocal used
            used += size
            return raw[used - size : used]

    with monkeypatch.context() as patch:
        patch.setattr(np.random, "SFC64", Rigged)
        return count_hits(samples, np.random.SeedSequence(0))


def padded(values: list[int]) -> list[int]:
    return values + [0] * (-len(values) % BLOCK)


def test_the_rule_is_exact_at_the_edge_of_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = list(range(SIDE))
    edge = [last_hit(column) for column in columns]
    assert all(0 <= row < SIDE for row in edge)
    assert throw(monkeypatch, columns, edge, SIDE) == SIDE
    beyond = [(column, row + 1) for column, row in zip(columns, edge, strict=True)]
    outside = [(column, row) for column, row in beyond if row < SIDE]
    assert len(outside) > SIDE - 600  # near column 0 the circle leaves the square
    x, y = (padded([cell[axis] for cell in outside]) for axis in (0, 1))
    assert throw(monkeypatch, x, y, len(outside)) == 0


def exact(samples: int, stream: np.random.SeedSequence) -> int:
    """Count the hits among the same points in 64-bit integers."""
    blocks = -(-samples // BLOCK)
    raw = np.random.SFC64(stream).random_raw(blocks * BLOCK // 2).view(np.uint16)
    cells = raw.reshape(blocks, 2, BLOCK).astype(np.int64)
    distance = ((2 * cells + 1) ** 2).sum(axis=1).ravel()[:samples]
    return int((distance < 4 * SIDE**2).sum())


@pytest.mark.parametrize(
    "samples", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7, 1_000_003]
)
def test_any_number_of_samples_is_counted_exactly(samples: int) -> None:
    stream = np.random.SeedSequence(5)
    assert count_hits(samples, stream) == exact(samples, np.random.SeedSequence(5))


class World:
    """A rank among ``size``; their hits are summed when all are known."""

    def __init__(self, rank: int, size: int, others: list[int] | None = None) -> None:
        self.rank, self.size, self.others = rank, size, others or []
        self.sent: list[int] = []

    def Get_rank(self) -> int:  # noqa: N802, as in mpi4py
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Allreduce(self, mine: NDArray[np.int64], total: NDArray[np.int64]) -> None:  # noqa: N802
        assert mine.dtype == total.dtype == np.int64
        self.sent = mine.tolist()
        total[:] = mine + sum(self.others)


def hits_of(samples: int, seed: int, size: int, naive: bool = False) -> list[int]:
    hits = []
    for rank in range(size):
        world = World(rank, size)
        assert estimate(world, samples, seed, naive=naive).samples == samples
        hits += world.sent
    return hits


@pytest.mark.parametrize("size", [1, 2, 3])
def test_seed_and_ranks_determine_the_digits(size: int) -> None:
    assert hits_of(100_001, 7, size) == hits_of(100_001, 7, size)
    assert hits_of(100_001, 7, size) != hits_of(100_001, 8, size)
    assert sum(hits_of(3_000_000, 7, size)) != sum(hits_of(3_000_000, 7, size + 1))


def test_each_rank_has_an_independent_stream() -> None:
    assert len(set(hits_of(4_000_000, 7, 4))) == 4


def test_the_ranks_share_all_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    monkeypatch.setattr(pi, "count_hits", lambda samples, stream: parts.append(samples) or 0)
    for rank in range(3):
        estimate(World(rank, 3), 11, 1)
    assert parts == [4, 4, 3]


def test_the_sum_is_over_all_ranks() -> None:
    hits = hits_of(100_001, 7, 3)
    for rank in range(3):
        others = hits[:rank] + hits[rank + 1 :]
        result = estimate(World(rank, 3, others), 100_001, 7)
        assert result == PiEstimate(sum(hits), 100_001)


@pytest.mark.parametrize("counter", [count_hits, count_hits_naive])
@pytest.mark.parametrize("seed", [1, 2])
def test_pi_is_within_its_error(
    counter: Callable[[int, np.random.SeedSequence], int], seed: int
) -> None:
    result = PiEstimate(counter(400_000, np.random.SeedSequence(seed)), 400_000)
    assert abs(result.pi - math.pi) < 4.5 * result.error
    assert result.pi != math.pi


def test_the_standard_error_of_a_fair_coin() -> None:
    assert PiEstimate(50, 100).pi == 2
    assert PiEstimate(50, 100).error == 4 * 0.5 / 10
    assert PiEstimate(20, 100).error == pytest.approx(4 * 0.4 / 10)
    assert PiEstimate(7, 7).error == PiEstimate(0, 7).error == 0
    truth = round(math.pi / 4 * 10**8)
    expected = 4 * math.sqrt(math.pi / 4 * (1 - math.pi / 4) / 10**8)
    assert PiEstimate(truth, 10**8).error == pytest.approx(expected)


def test_the_error_is_the_deviation_of_repeated_runs() -> None:
    samples, runs = 20_000, 400
    streams = np.random.SeedSequence(3).spawn(runs)
    values = [4 * count_hits(samples, stream) / samples for stream in streams]
    expected = PiEstimate(round(samples * math.pi / 4), samples).error
    # The deviation of 400 values is known to 1 / sqrt(800) = 3.5 %: four of those.
    assert np.std(values) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["--samples", "0"], "--samples"),
        (["--samples", "x"], "--samples"),
        (["--samples", "inf"], "--samples"),
        (["--samples", "1e20"], "--samples: 1e20 is larger than 2^63 - 1"),
        (["--sample", "5"], "--sample"),
        (["9"], "9"),
    ],
)
def test_a_wrong_command_line_is_reported(line: list[str], word: str) -> None:
    assert build_parser().read([f"--samples={2**63 - 1}"]).samples == 2**63 - 1
    with pytest.raises(UsageError) as caught:
        build_parser().read(line)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_report() -> None:
    text = report(PiEstimate(785_398, 1_000_000), 0.5, 2, as_json=False)
    assert "pi = 3.14159 ± 0.00164" in text or "pi = 3.1416 ± 0.0016" in text
    assert "1,000,000 samples on 2 ranks in 0.50 s: 2.0 million samples/s" in text
    values = json.loads(report(PiEstimate(785_398, 1_000_000), 0.5, 2, as_json=True))
    assert values["pi"] == 3.141592
    assert values["samples_per_second"] == 2_000_000
    assert values["ranks"] == 2
    assert "on 1 rank in" in report(PiEstimate(3, 3), 1.0, 1, as_json=False)


def test_a_terminal_shows_progress() -> None:
    line = [sys.executable, "-m", "hvdtrain.pi", "--samples=9e18"]
    seen = record(line, columns=80, interrupt=[" years to go"])
    assert re.search(r"pi: 0.0 % of the samples, about [\d,]+ years to go \.\.\. \d+ s", seen.text)
    rows = [row for row in screen(seen.text) if row]
    assert (seen.code, rows) == (130, ["hvdtrain: interrupted"]), seen.text


def test_a_missing_mpi_library_is_reported_in_one_line_with_the_extra(tmp_path: Path) -> None:
    """mpi4py without an MPI library raises an error of four lines."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    error = "cannot load MPI library\n  libmpi.so.40: cannot open\n  libmpi.so.12: cannot open"
    (tmp_path / "mpi4py" / "MPI.py").write_text(f"raise RuntimeError({error!r})")
    for module in ("pi", "collectives"):
        result = subprocess.run(
            [sys.executable, "-m", f"hvdtrain.{module}"],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2
        assert line.startswith("hvdtrain: error: mpi4py cannot load an MPI library (cannot")
        assert "): pip install 'hvdtrain[mpi]', or load the module of your MPI" in line
