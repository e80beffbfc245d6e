"""A real sweep on the embedded digits: interrupted, resumed, evaluated, rejected, reported."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Outcome, begin, end_session, ended, run, until
from tests.parallel import resident
from tests.parallel.conftest import FRAMEWORKS, SCRIPTS, assert_gone, family

VERB = [sys.executable, "-m", "hvdtrain.cli"]
TRAIN = ["python", "-m", "hvdtrain.mnist", "--model", "small", "--num-steps", "10"]
PLOTS = ("scaling.pdf", "scaling.png")
SWEEP = [*VERB, "scaling", "--ranks", "1,2", "--repeat", "1", "--json"]


def scaling(folder: Path, *command: str) -> Outcome:
    return run([*SWEEP, "--out", str(folder), "--", *command])


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "results.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was interrupted in its second run, while training."""
    folder = tmp_path_factory.mktemp("sweep")
    process = begin([*SWEEP, "--out", str(folder), "--", *TRAIN], start_new_session=True)
    try:  # hvdtrain, mpirun and two ranks
        until(lambda: lines(folder) and len(family(process)) >= 4, process)
        processes = family(process)
        process.send_signal(signal.SIGINT)
        assert ended(process, 130).splitlines()[-1] == "hvdtrain: error: interrupted"
        assert_gone(processes)
    finally:
        end_session(process.pid)
    return folder


@pytest.fixture(scope="module")
def study(interrupted: Path) -> tuple[Path, Outcome]:
    """The same sweep, continued to its end."""
    first = lines(interrupted)
    assert [line["ranks"] for line in first] == [1]
    outcome = scaling(interrupted, *TRAIN)
    assert outcome.code == 0, outcome.err[-3000:]
    assert lines(interrupted)[0] == first[0]  # not run again
    return interrupted, outcome


def test_an_interrupted_sweep_continues(study: tuple[Path, Outcome]) -> None:
    folder, outcome = study
    assert [(line["ranks"], line["repeat"]) for line in lines(folder)] == [(1, 1), (2, 1)]
    assert "[2/2] 2 ranks, run 1" in outcome.err
    assert "[1/2]" not in outcome.err


def test_the_results_of_a_sweep(study: tuple[Path, Outcome]) -> None:
    folder, outcome = study
    data = json.loads(outcome.out)  # nothing else is on standard output
    single, double = data["sizes"]
    rates = [line["summary"]["images_per_second_mean"] for line in lines(folder)]
    assert [single["images_per_second_mean"], double["images_per_second_mean"]] == rates
    assert double["efficiency"] == pytest.approx(rates[1] / rates[0] / 2)
    assert (folder / "results.csv").read_text().startswith("ranks,repeat,images_per_second,")
    assert (folder / "scaling.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert data["files"] == [str(folder / name) for name in ("results.csv", *PLOTS)]


def test_the_parts_of_a_step(study: tuple[Path, Outcome]) -> None:
    single, double = (line["summary"] for line in lines(study[0]))
    for summary in (single, double):
        split = summary["step_split"]
        assert split["steps"] == 8  # of ten, two are dropped
        assert split["undivided"] is None
        assert min(split["data"], split["compute"]) > 0
    assert single["step_split"]["waiting"] == 0
    assert single["gradient_messages"] is None
    assert min(double["step_split"]["communication"], double["step_split"]["waiting"]) > 0
    assert double["step_split"]["slowest_rank"] in (0, 1)
    # The small net has 21,840 parameters in fp32, aligned; a stop flag is sent with them.
    assert double["gradient_messages"]["count"] == 1
    assert 4 * 21_840 < double["gradient_messages"]["bytes"] < 4 * 22_200


def test_each_rank_had_the_same_threads(study: tuple[Path, Outcome]) -> None:
    threads = {line["threads"] for line in lines(study[0])}
    variables = [line["summary"]["environment"]["variables"] for line in lines(study[0])]
    assert {values["OMP_NUM_THREADS"] for values in variables} == set(map(str, threads))
    assert len(threads) == 1


def test_runs_of_two_models_are_not_comparable(study: tuple[Path, Outcome], tmp_path: Path) -> None:
    single, double = lines(study[0])
    double["summary"]["model"] = "tutorial"
    text = "".join(json.dumps(line) + "\n" for line in (single, double))
    (tmp_path / "results.jsonl").write_text(text)
    outcome = run([*VERB, "scaling", "--out", str(tmp_path)], code=2)
    assert "the model is not the same in all runs" in outcome.err
    assert "small in 1-1; tutorial in 2-1" in outcome.err


def test_a_command_that_fails(tmp_path: Path) -> None:
    outcome = scaling(tmp_path, "python", "-c", "raise SystemExit('no such luck')")
    assert outcome.code == 1
    assert "no such luck" in outcome.err
    assert "the run on 1 rank failed" in outcome.said[-1]
    assert "no such luck" in (tmp_path / "runs" / "1-1.log").read_text()
    assert lines(tmp_path) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_slowest_rank_is_named(framework: str, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    script = str(SCRIPTS / "faulty_trainer.py")
    options = ("--model=small", "--num-steps=10", f"--framework={framework}", "--quiet")
    resident.ranks(2, script, "late:1:200", *options, f"--summary={summary}", code=0)
    split = json.loads(summary.read_text())["step_split"]
    assert (split["slowest_rank"], split["undivided"]) == (1, None)
    # Rank 0 waits while rank 1 sleeps, however busy the machine is.
    assert split["waiting"] > 0.05
