"""The collectives of each library on real ranks, and the lesson."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, ranks, run
from tests.parallel import resident
from tests.parallel.conftest import SCRIPTS, run_script

# A report of several kilobytes may be cut if it passes through mpirun.
TO_FILE = ("-m", "hvdtrain.commands.doctor.to_file")
SCRIPT = str(SCRIPTS / "collectives.py")
LIBRARIES = ("mpi4py", "horovod_torch", "horovod_tf", "torch_distributed")


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_collective_of_each_library(library: str, tmp_path: Path) -> None:
    framework = "tensorflow" if library == "horovod_tf" else "pytorch"
    words = ("each", library, str(tmp_path))
    run_script(3, "collectives.py", *words, folder=tmp_path, framework=framework)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_lesson(size: int, tmp_path: Path) -> None:
    page, file = tmp_path / "lesson.html", tmp_path / "lesson.json"
    words = ("hvdtrain.collectives", "--json", "--html", str(page))
    resident.ranks(size, *TO_FILE, str(file), *words, code=0)
    every = range(size)
    numbers = [[10 * (rank + 1) + index for index in every] for rank in every]
    first = [row[:1] for row in numbers]
    sums = [sum(row[index] for row in numbers) for index in every]
    firsts = [row[0] for row in numbers]
    nothing: list[list[int]] = [[]] * (size - 1)
    lesson = json.loads(file.read_text())["lesson"]
    shown = {part["name"]: (part["before"], part["after"]) for part in lesson}
    assert shown == {
        "broadcast": (numbers, [numbers[0]] * size),
        "scatter": ([numbers[0], *nothing], [[number] for number in numbers[0]]),
        "gather": (first, [firsts, *nothing]),
        "reduce": (numbers, [sums, *nothing]),
        "allreduce": (numbers, [sums] * size),
        "allgather": (first, [firsts] * size),
        "reduce-scatter": (numbers, [[total] for total in sums]),
        "alltoall": (numbers, [[row[index] for row in numbers] for index in every]),
        "send and receive": (first, [first[rank - 1] for rank in every]),
    }
    assert page.read_text().count("<svg") == len(shown)


UNPICKLES = """
import runpy, sys
from mpi4py import MPI
def refuse(*_): raise AssertionError("a pickle")
MPI.pickle.__init__(refuse, refuse)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "program",
    [
        "hvdtrain.collectives",
        "hvdtrain.collectives --time --libraries=mpi4py --sizes=4 --seconds=0.001",
        "hvdtrain.commands.doctor.rank_report",
        "hvdtrain.mnist --strategy=mpi --num-steps=2 --quiet",
    ],
)
def test_no_rank_unpickles_what_mpi_brings(program: str) -> None:
    ranks(2, "-c", UNPICKLES, *program.split(), code=0)


def test_times_of_each_library(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    words = ("hvdtrain.collectives", "--time", "--json", "--sizes=4,65536", "--seconds=0.001")
    files = ("--html", str(tmp_path / "times.html"), "--plot", str(tmp_path / "times"))
    resident.ranks(2, *TO_FILE, str(file), *words, *files, code=0)
    assert (tmp_path / "times.png").stat().st_size > 10_000
    assert "data:image/svg+xml;base64," in (tmp_path / "times.html").read_text()
    report = json.loads(file.read_text())
    assert (report["ranks"], report["hosts"]) == (2, 1)
    assert list(report["backends"]) == ["mpi4py", "horovod", "gloo", "nccl"]
    assert report["backends"]["nccl"]["state"] in ("ok", "absent")
    for name, collectives in (("mpi4py", 9), ("horovod", 5), ("gloo", 9)):
        times = report["backends"][name]
        assert (times["state"], times["left_out"]) == ("ok", {})
        assert len(times["rows"]) == 2 * collectives
        assert len({fit["collective"] for fit in times["fits"]}) == collectives
        for row in times["rows"]:
            assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
            assert row["bytes"] in (4, 65536) and row["repeats"] >= 5


def test_a_library_that_fails_in_the_middle_is_a_row() -> None:
    outcome = ranks(2, SCRIPT, "breaking", code=0)
    failure, after = json.loads(outcome.out)
    assert (failure["state"], after) == ("error", "")
    assert failure["reason"].startswith("rank ")


@pytest.mark.parametrize(("number", "total"), [(1, 1.0), (3, 0.0)])
def test_horovod_and_mpi_sum_by_the_algorithm_of_the_variables(number: int, total: float) -> None:
    """Linear, ((d + c) + b) + a; recursive doubling, (a + b) + (c + d)."""
    variables = {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
    }
    outcome = resident.ranks(4, SCRIPT, "order", **variables, code=0)
    assert outcome.out.splitlines() == [str([[total], [total]])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--library=gloo", "--library: no such option; did you mean --libraries?"),
        ("--sizes=4", "--sizes needs --time"),
        ("--time --sizes=2", "--sizes: 2 bytes: must be at least 4"),
        ("--time --libraries=smoke", "--libraries smoke: choose from mpi4py, "),
        ("--html /dev/null/page.html", "--html /dev/null/page.html: "),
    ],
)
def test_wrong_use(words: str, message: str) -> None:
    outcome = resident.ranks(2, "-m", "hvdtrain.collectives", *words.split(), code=2)
    assert len(outcome.said) == 1 and message in outcome.said[0]


def test_the_lesson_without_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is none')")
    line = [sys.executable, "-m", "hvdtrain.collectives"]
    outcome = run(line, code=2, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert "(there is none): pip install 'hvdtrain[mpi]'" in line
