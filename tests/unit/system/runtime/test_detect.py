"""Launcher detection: variables of each launcher, precedence, and ignored values."""

from __future__ import annotations

import pytest

from hvdtrain.system.runtime.detect import (
    BY_HAND,
    HOROVODRUN,
    LAUNCHERS,
    SINGLE_RANK,
    SPAWN,
    LaunchInfo,
    detect,
    is_restarted,
)

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PALS_RANKID": "5", "PALS_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", **TORCH}
HOROVOD = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
}
KUBERNETES = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", **TORCH}
# Variables that Slurm sets for a batch script, outside of a step ...
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
# ... and those of srun.
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
TABLE = {
    "mpirun (Open MPI)": OPEN_MPI,
    "mpiexec (Hydra)": HYDRA,
    "mpiexec (Cray PALS)": PALS,
    "torchrun": TORCHRUN,
    HOROVODRUN: HOROVOD,
    SPAWN: {**KUBERNETES, "HVDTRAIN_SPAWNED_BY": "4711"},
    "srun": SRUN,
    BY_HAND: KUBERNETES,
}


@pytest.mark.parametrize("name", {launcher.name: None for launcher in LAUNCHERS})
def test_each_launcher(name: str) -> None:
    assert detect(TABLE[name]) == LaunchInfo(name, rank=5, size=8, local_rank=1, local_size=4)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


STEP = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, SINGLE_RANK),
        ({"PATH": "/bin", "HOME": "/root"}, LaunchInfo(None, 0, 1, 0, 1)),
        (BATCH_SCRIPT, SINGLE_RANK),
        # The other variables may be inherited: sbatch exports the environment of its caller.
        (without(SRUN, "SLURM_STEP_ID"), SINGLE_RANK),
        ({**BATCH_SCRIPT, **OPEN_MPI}, LaunchInfo("mpirun (Open MPI)", 5, 8, 1, 4)),
        ({**STEP, **OPEN_MPI}, LaunchInfo("mpirun (Open MPI)", 5, 8, 1, 4)),
        # Hydra starts its proxies by srun, each in a separate step.
        ({**STEP, **HYDRA}, LaunchInfo("mpiexec (Hydra)", 5, 8, 1, 4)),
        # PALS sets the variables of PMI too.
        ({**HYDRA, **PALS}, LaunchInfo("mpiexec (Cray PALS)", 5, 8, 1, 4)),
        # As on Polaris; PALS_SIZE is set by `hvdtrain launch`, for sites without PMI_SIZE.
        (
            {**without(PALS, "PALS_SIZE"), "PMI_RANK": "5", "PMI_SIZE": "8"},
            LaunchInfo("mpiexec (Cray PALS)", 5, 8, 1, 4),
        ),
        # RANK and WORLD_SIZE may be set in a shell for other reasons.
        (without(TORCHRUN, "TORCHELASTIC_RUN_ID"), SINGLE_RANK),
        (
            {**without(TORCHRUN, "TORCHELASTIC_RUN_ID"), **OPEN_MPI},
            LaunchInfo("mpirun (Open MPI)", 5, 8, 1, 4),
        ),
        ({**OPEN_MPI, **TORCHRUN, "RANK": "3"}, LaunchInfo("torchrun", 3, 8, 1, 4)),
        ({**SRUN, **TORCHRUN, "RANK": "3"}, LaunchInfo("torchrun", 3, 8, 1, 4)),
        # Variables set by hand come last.
        ({**KUBERNETES, **OPEN_MPI}, LaunchInfo("mpirun (Open MPI)", 5, 8, 1, 4)),
        ({**KUBERNETES, **SRUN}, LaunchInfo("srun", 5, 8, 1, 4)),
        ({**KUBERNETES, "MASTER_ADDR": ""}, SINGLE_RANK),
    ],
)
def test_precedence(environ: dict[str, str], launch: LaunchInfo) -> None:
    assert detect(environ) == launch


@pytest.mark.parametrize("name", TABLE)
def test_a_launcher_without_a_valid_rank_or_size_is_ignored(name: str) -> None:
    launcher = next(entry for entry in LAUNCHERS if entry.name == name)
    for variable in (launcher.rank, launcher.size):
        assert detect(without(TABLE[name], variable)) == SINGLE_RANK
        for garbage in ("", "x", "-1", "1.5", "0x2", " ", "²", "1e1", "None", "(2)"):
            assert detect({**TABLE[name], variable: garbage}) == SINGLE_RANK


@pytest.mark.parametrize("name", TABLE)
def test_without_local_numbers_one_host_is_assumed(name: str) -> None:
    launcher = next(entry for entry in LAUNCHERS if entry.name == name)
    local = (launcher.local_rank, launcher.local_size)
    expected = LaunchInfo(name, rank=5, size=8, local_rank=5, local_size=8)
    assert detect(without(TABLE[name], *local)) == expected
    for value in ("", "many"):
        assert detect({**TABLE[name], **dict.fromkeys(local, value)}) == expected


@pytest.mark.parametrize(
    ("tasks", "local_size"), [("4", 4), ("4(x2)", 4), ("2(x3),1", 2), ("3,2", 3), ("16(x128)", 16)]
)
def test_tasks_per_node_of_slurm(tasks: str, local_size: int) -> None:
    assert detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == local_size


def test_detect_reads_only_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in OPEN_MPI.items():
        monkeypatch.setenv(key, value)
    assert detect({}) == SINGLE_RANK


@pytest.mark.parametrize(
    ("environ", "restarted"),
    [
        ({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (TORCHRUN, False),
        ({**OPEN_MPI, "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({}, False),
    ],
)
def test_who_restarts_ranks(environ: dict[str, str], restarted: bool) -> None:
    assert is_restarted(environ) == restarted
