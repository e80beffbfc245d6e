"""Inject a fault into a training, resume it, and compare its end with that without the fault."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.steps import checkpoint as checkpoints
from tests.conftest import Outcome, until
from tests.faults.job import LAUNCHERS, Job, lines
from tests.faults.table import FAULTS, GOES_ON, images
from tests.parallel.conftest import Training

OWN = {"processes", "locks", "partial checkpoints"}  # what hvdtrain itself must not leave
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
def undisturbed(strategy: str, *, reads_images: bool) -> dict[str, np.ndarray]:
    """Return the tensors at the end of a training without faults."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        job = Job(Path(folder), strategy)
        if reads_images:
            stack.enter_context(images(job))
        job.start()
        outcome = job.finish(120)
        assert outcome.code == 0, outcome.err
        return end_of(job)


def end_of(job: Job) -> dict[str, np.ndarray]:
    """Return the tensors of the newest checkpoint, which is that of the last step."""
    assert step_of(job.newest) == job.steps, job.newest
    return Training(Outcome(0, "", ""), job.folder).tensors()


def step_of(checkpoint: str) -> int:
    """Return the number of updates of a checkpoint, by its name."""
    return int(re.split("[-+]", checkpoint)[1])


def inject(name: str, strategy: str, folder: Path, seed: int) -> Result:
    """Inject a fault; return what became of the training, also if that is a problem."""
    fault = FAULTS[name]
    expected = undisturbed(strategy, reads_images="data loader" in name)
    job = Job(folder, strategy, LAUNCHERS[fault.launcher], seed=seed)
    seconds, problem, lost = 0.0, "", 0
    left: dict[str, list[str]] = {}
    outcome = None
    try:
        with fault.surroundings(job):
            job.start()
            before = job.wait_for_training()
            fault.inject(job)
            began = time.monotonic()
            if GOES_ON in fault.codes and len(fault.codes) == 1:
                until(lambda: job.newest > before, seconds=fault.seconds, detail=lambda: job.output)
                seconds = time.monotonic() - began
            outcome = job.finish(60 if GOES_ON in fault.codes else fault.seconds)
            seconds = seconds or time.monotonic() - began
            left = job.left()
        assert outcome.code in fault.codes, f"exit code {outcome.code}: {outcome.err[-3000:]}"
        assert re.search(fault.report, outcome.err), f"no {fault.report!r} in {outcome.err[-3000:]}"
        assert "Traceback" not in outcome.err or "user" in name, outcome.err[-3000:]
        assert not (left and fault.clean) and "processes" not in left, f"left: {left}"
        if outcome.code != GOES_ON:
            intact = checkpoints.load_newest(job.checkpoints)
            lost = max(0, step_of(before) - (intact.state["step"] if intact else 0))
            assert lost <= fault.lost, f"{before} was saved, {intact and intact.path.name} is left"
            resumed = Job(folder, strategy, training=job.training, steps=job.steps)
            resumed.start()
            try:
                again = resumed.finish(120)
                assert again.code == 0, f"resumed: exit code {again.code}: {again.err[-3000:]}"
            finally:
                resumed.end()
            # Of killed processes Open MPI leaves temporary files and shared memory.
            still = {kind: names for kind, names in resumed.left().items() if kind not in left}
            assert not still and not resumed.left().keys() & OWN, f"left at the end: {still}"
        ended = end_of(job)
        assert ended.keys() == expected.keys()
        for key, value in expected.items():
            difference = float(np.linalg.norm(value - ended[key]))
            assert difference <= TOLERANCE * float(np.linalg.norm(value)), f"{key}: {difference}"
    except AssertionError as error:
        problem = str(error) or repr(error)
    finally:
        job.end()
    shutil.rmtree(job.temporary, ignore_errors=True)
    output = outcome.err if outcome else job.output
    reported = [line for line in lines(output) if re.search(fault.report, line)]
    return Result(
        name,
        strategy,
        seconds,
        outcome.code if outcome else -1,
        (reported or [""])[0][:200],
        lost,
        ", ".join(f"{len(names)} {kind}" for kind, names in left.items()),
        problem,
    )
