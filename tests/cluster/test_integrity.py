"""Ranks started by srun without PMIx, and ``hvdtrain doctor`` inside a Slurm job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster.slurm import Cluster
from tests.conftest import BIN, ROOT


def test_worlds_of_one_under_srun(cluster: Cluster) -> None:
    line = ("srun", "-n", "2", sys.executable, "-m", "hvdtrain.mnist", "--num-steps=2", "--quiet")
    outcome = cluster.command(*line, cwd=ROOT)
    assert outcome.code == 2, outcome.err[-2000:]
    (said,) = outcome.said  # by rank 0; both end with 2
    assert outcome.err.count("Exited with exit code 2") == 2
    assert "srun started 2 processes, but Horovod sees a world of 1" in said
    assert "slurmstepd" in said
    assert (
        f"`srun --mpi=pmix` (`srun --mpi=list` shows whether this Slurm has it), or with {BIN}"
        in (said)
    )


def test_doctor_in_a_job_of_four_slots(cluster: Cluster, tmp_path: Path) -> None:
    line = ("salloc", "-n", "4", sys.executable, "-m", "hvdtrain.cli", "doctor", "--json")
    outcome = cluster.command(*line, cwd=tmp_path, OMP_NUM_THREADS="64")
    assert outcome.code == 0, outcome.out + outcome.err
    findings = {finding["check"]: finding for finding in json.loads(outcome.out)["findings"]}
    assert "inside job" in findings["scheduler"]["evidence"]
    assert ":4, 4 slots" in findings["hosts of the job"]["evidence"]
    assert "64 threads per rank, 4 ranks" in findings["OMP_NUM_THREADS"]["evidence"]
