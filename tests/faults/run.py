"""Inject a fault into a training, resume it, and compare its end with that without the fault."""

from __future__ import annotations

import functools
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from hvdtrain.steps import checkpoint as checkpoints
from tests.conftest import Outcome, until
from tests.faults.job import LAUNCHERS, Job, lines
from tests.faults.table import FAULTS, GOES_ON, Fault, nothing
from tests.parallel.conftest import Training, difference

TOLERANCE = 1e-9  # relative, in fp64


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


def survive(name: str, strategy: str, folder: Path, seed: int) -> str:
    """Inject a fault into a training, resume it, and check its end; return a line on the fault."""
    fault = FAULTS[name]
    launcher = LAUNCHERS[fault.launcher]
    expected = undisturbed(strategy, images=fault.images)
    job = Job(
        folder,
        strategy,
        launcher,
        seed=seed,
        images=fault.images,
        pace=fault.pace,
        options=fault.options,
    )
    seconds, before = 0.0, ""
    with fault.surroundings(job), job.running():
        began = time.monotonic()
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
    check_outcome(outcome, fault)
    assert left.keys() <= set(fault.leaves), f"left: {left}"
    check_saved(outcome, job)
    lost = 0
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
    assert difference(expected, end_of(job)) <= TOLERANCE
    kinds = ", ".join(f"{len(names)} {kind}" for kind, names in left.items()) or "nothing"
    return (
        f"{name} ({strategy}): {seconds:.1f} s, exit code {outcome.code}, {lost} saved updates "
        f"lost, left {kinds} [{reported(outcome, fault)}]"
    )


def check_outcome(outcome: Outcome, fault: Fault) -> None:
    """Check exit code and output of the job with the fault."""
    output = outcome.out[-3000:]
    assert outcome.code in fault.codes, f"exit code {outcome.code}: {output}"
    assert re.search(fault.report, "\n".join(lines(outcome.out))), f"no {fault.report!r}: {output}"
    assert re.search(fault.output, outcome.out), f"no {fault.output!r}: {output}"
    if outcome.code:
        assert re.search(fault.failure, outcome.out), f"no {fault.failure!r}: {output}"
    assert "Traceback" not in outcome.out or fault.traceback, output


def reported(outcome: Outcome, fault: Fault) -> str:
    """Return the line with the fault."""
    wanted = fault.report or fault.failure
    return next((line[:200] for line in lines(outcome.out) if re.search(wanted, line)), "-")
