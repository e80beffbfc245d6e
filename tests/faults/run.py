"""Inject a fault into a training, resume it, and compare its end with that without the fault."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.steps import checkpoint as checkpoints
from tests.conftest import Outcome, until
from tests.faults.job import LAUNCHERS, Job, lines
from tests.faults.table import FAULTS, GOES_ON, nothing
from tests.parallel.conftest import Training

TOLERANCE = 1e-9  # relative, in fp64


@dataclass(frozen=True)
class Result:
    """What became of a training."""

    fault: str
    strategy: str
    seconds: float  # from the fault until the job was over, or saved again
    code: int  # of the launcher
    report: str  # of hvdtrain, the line with the fault
    lost: int  # updates that had been saved before the fault
    left: str  # after the fault
    problem: str = ""  # what was not as promised

    def __str__(self) -> str:
        """Return a line."""
        end = f"PROBLEM: {self.problem}" if self.problem else "as promised"
        left = f", left {self.left}" if self.left else ""
        return (
            f"{self.fault} ({self.strategy}): {self.seconds:.1f} s, exit code {self.code}{left}, "
            f"{end} [{self.report}]"
        )


@functools.cache
def undisturbed(strategy: str, *, images: bool) -> dict[str, np.ndarray]:
    """Return the tensors at the end of a training without faults."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), strategy, images=images)
        with job.running():
            outcome = job.finish(120)
        assert outcome.code == 0, outcome.out
        return end_of(job)


def end_of(job: Job) -> dict[str, np.ndarray]:
    """Return the tensors of the newest checkpoint, which is that of the last step."""
    assert step_of(job.newest) == job.steps, job.newest
    return Training(Outcome(0, "", ""), job.folder).tensors()


def step_of(checkpoint: str) -> int:
    """Return the number of updates of a checkpoint, by its name."""
    return int(re.split("[-+]", checkpoint)[1])


def check_saved(outcome: Outcome, job: Job) -> None:
    """Check that a job that reports a save at its end has saved that step."""
    if saved := re.search(r"stopped after step (\d+), saved", outcome.out):
        assert int(saved[1]) == step_of(job.newest), f"{saved[0]} {job.newest}"


def result_of(name: str, strategy: str, folder: Path, seed: int) -> Result:
    """Inject a fault; return what became of the training, also if that is a problem."""
    fault = FAULTS[name]
    launcher = LAUNCHERS[fault.launcher]
    job = Job(
        folder,
        strategy,
        launcher,
        seed=seed,
        images=fault.images,
        pace=fault.pace,
        options=fault.options,
    )
    seconds, problem, lost = 0.0, "", 0
    left: dict[str, list[str]] = {}
    outcome = Outcome(-1, "", "")
    try:
        expected = undisturbed(strategy, images=fault.images)
        with fault.surroundings(job), job.running():
            began, before = time.monotonic(), ""
            if fault.inject is not nothing:
                before = job.wait_for_training()
                fault.inject(job)
                began, before = time.monotonic(), job.newest or before
            if fault.codes == (GOES_ON,):
                until(lambda: job.newest > before, seconds=fault.seconds, detail=lambda: job.output)
                seconds = time.monotonic() - began
            outcome = job.finish(60 if GOES_ON in fault.codes else fault.seconds)
            seconds = seconds or time.monotonic() - began
            left = job.left()
        output = outcome.out[-3000:]
        assert outcome.code in fault.codes, f"exit code {outcome.code}: {output}"
        assert re.search(fault.report, "\n".join(lines(outcome.out))), (
            f"no {fault.report!r}: {output}"
        )
        assert re.search(fault.output, outcome.out), f"no {fault.output!r}: {output}"
        if outcome.code:
            assert re.search(fault.failure, outcome.out), f"no {fault.failure!r}: {output}"
        assert "Traceback" not in outcome.out or fault.traceback, output
        assert left.keys() <= set(fault.leaves), f"left: {left}"
        check_saved(outcome, job)
        if outcome.code != GOES_ON:
            intact = checkpoints.load_newest(job.checkpoints)
            lost = max(0, step_of(before) - (intact.state["step"] if intact else 0))
            assert lost <= fault.lost, f"{before} was saved, {intact and intact.path.name} is left"
            resumed = Job(folder, strategy, images=fault.images)
            with resumed.running():
                again = resumed.finish(120)
                still = resumed.left()  # except what Open MPI left of killed processes
            assert again.code == 0, f"resumed: exit code {again.code}: {again.out[-3000:]}"
            assert not still, f"left at the end: {still}"
        ended = end_of(job)
        assert ended.keys() == expected.keys()
        for key, value in expected.items():
            difference = float(np.linalg.norm(value - ended[key]))
            assert difference <= TOLERANCE * float(np.linalg.norm(value)), f"{key}: {difference}"
    except AssertionError as error:
        problem = str(error) or repr(error)
    except Exception:  # of this row only
        problem = traceback.format_exc()
    shutil.rmtree(job.temporary, ignore_errors=True)
    wanted = fault.report or fault.failure
    reported = [line for line in lines(outcome.out) if re.search(wanted, line)]
    return Result(
        name,
        strategy,
        seconds,
        outcome.code,
        (reported or [""])[0][:200],
        lost,
        ", ".join(f"{len(names)} {kind}" for kind, names in left.items()),
        problem,
    )
