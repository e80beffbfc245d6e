"""Launcher detection: variables of each launcher, precedence, and ignored values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import (
    BY_HAND,
    HOROVODRUN,
    LAUNCHERS,
    SINGLE_RANK,
    SPAWN,
    LaunchInfo,
    check_local_rank,
    detect,
    is_elastic,
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
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
HOROVOD = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
}
KUBERNETES = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
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


@pytest.mark.parametrize("name", TABLE)
def test_each_launcher(name: str) -> None:
    assert detect(TABLE[name]) == LaunchInfo(name, rank=5, size=8, local_rank=1, local_size=4)


def test_every_launcher_is_tested() -> None:
    assert set(TABLE) == {launcher.name for launcher in LAUNCHERS}


def test_without_a_launcher_the_world_is_one_rank() -> None:
    assert detect({}) == SINGLE_RANK
    assert detect({"PATH": "/bin", "HOME": "/root"}) == LaunchInfo(None, 0, 1, 0, 1)


def test_a_batch_script_is_not_a_rank() -> None:
    assert detect(BATCH_SCRIPT) == SINGLE_RANK


def test_a_step_is_recognized_by_its_id() -> None:
    # The other variables may be inherited: sbatch exports the environment of its caller.
    left_over = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    assert detect(left_over) == SINGLE_RANK


def test_mpirun_takes_precedence_over_slurm() -> None:
    assert detect({**BATCH_SCRIPT, **OPEN_MPI}).launcher == "mpirun (Open MPI)"
    assert detect({**SRUN, "SLURM_STEP_NUM_TASKS": "2", **OPEN_MPI}).size == 8


def test_mpiexec_takes_precedence_over_a_slurm_step() -> None:
    # Hydra starts its proxies by srun, each in a separate step.
    step = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    launch = detect({**step, **HYDRA})
    assert (launch.launcher, launch.rank, launch.size) == ("mpiexec (Hydra)", 5, 8)


def test_pals_sets_the_variables_of_pmi_too() -> None:
    assert detect({**HYDRA, **PALS}).launcher == "mpiexec (Cray PALS)"


def test_the_size_under_pals_is_set_by_pmi() -> None:
    # As on Polaris; PALS_SIZE is set by `hvdtrain launch`, for sites without PMI_SIZE.
    environ = {name: value for name, value in PALS.items() if name != "PALS_SIZE"}
    pmi = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1"}
    assert detect({**environ, **pmi}) == LaunchInfo("mpiexec (Cray PALS)", 5, 8, 1, 4)


def test_torchrun_is_recognized_by_its_mark_only() -> None:
    # RANK and WORLD_SIZE may be set in a shell for other reasons.
    without = {key: value for key, value in TORCHRUN.items() if key != "TORCHELASTIC_RUN_ID"}
    assert detect(without) == SINGLE_RANK
    assert detect({**without, **OPEN_MPI}).launcher == "mpirun (Open MPI)"


def test_variables_set_by_hand_come_last() -> None:
    assert detect({**KUBERNETES, **OPEN_MPI}).launcher == "mpirun (Open MPI)"
    assert detect({**KUBERNETES, **SRUN}).launcher == "srun"
    assert detect({**KUBERNETES, "MASTER_ADDR": ""}) == SINGLE_RANK


def test_torchrun_below_mpirun_or_srun_is_torchrun() -> None:
    inside = {**TORCHRUN, "RANK": "3"}
    assert detect({**OPEN_MPI, **inside}) == LaunchInfo("torchrun", 3, 8, 1, 4)
    assert detect({**SRUN, **inside}) == LaunchInfo("torchrun", 3, 8, 1, 4)


@pytest.mark.parametrize("name", TABLE)
def test_a_launcher_without_rank_or_size_is_ignored(name: str) -> None:
    launcher = next(entry for entry in LAUNCHERS if entry.name == name)
    for missing in (launcher.rank, launcher.size):
        environ = {key: value for key, value in TABLE[name].items() if key != missing}
        assert detect(environ) == SINGLE_RANK


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("garbage", ["", "x", "-1", "1.5", "0x2", " ", "²", "1e1", "None", "(2)"])
def test_invalid_values_are_ignored(name: str, garbage: str) -> None:
    launcher = next(entry for entry in LAUNCHERS if entry.name == name)
    for variable in (launcher.rank, launcher.size):
        assert detect({**TABLE[name], variable: garbage}) == SINGLE_RANK


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("value", [None, "", "many"])
def test_without_local_numbers_one_host_is_assumed(name: str, value: str | None) -> None:
    launcher = next(entry for entry in LAUNCHERS if entry.name == name)
    environ = dict(TABLE[name])
    for variable in (launcher.local_rank, launcher.local_size):
        if value is None:
            del environ[variable]
        else:
            environ[variable] = value
    assert detect(environ) == LaunchInfo(name, rank=5, size=8, local_rank=5, local_size=8)


@given(st.sampled_from(sorted(TABLE)), st.text(max_size=6), st.data())
def test_no_value_raises(name: str, value: str, data: st.DataObject) -> None:
    variable = data.draw(st.sampled_from(sorted(TABLE[name])))
    launch = detect({**TABLE[name], variable: value})
    # Without its mark, --spawn's variables are those set by hand.
    assert launch.launcher in (name, None, *([BY_HAND] if name == SPAWN else []))


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
    ("local_rank", "environ", "words"),
    [
        (0, TORCHRUN, ["--local-rank 0, but torchrun set LOCAL_RANK=1", "leave the option out"]),
        (0, KUBERNETES, ["--local-rank 0, but RANK and WORLD_SIZE set LOCAL_RANK=1"]),
        (2, OPEN_MPI, ["mpirun (Open MPI) set OMPI_COMM_WORLD_LOCAL_RANK=1"]),
        (1, {}, ["--local-rank 1, but there is no launcher"]),
    ],
)
def test_a_local_rank_that_differs_from_the_launchers_is_reported(
    local_rank: int, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        check_local_rank(local_rank, environ)
    assert all(word in str(caught.value) for word in words)


def test_a_local_rank_that_agrees_or_is_not_set_by_the_launcher() -> None:
    for environ in (TORCHRUN, KUBERNETES, OPEN_MPI, SRUN):
        check_local_rank(1, environ)
        check_local_rank(None, environ)
    check_local_rank(0, {})
    unset = {key: value for key, value in KUBERNETES.items() if not key.startswith("LOCAL")}
    check_local_rank(3, unset)  # the local rank is unknown


def test_only_the_elastic_launch_restarts_ranks_of_horovod() -> None:
    elastic = {**HOROVOD, "HVDTRAIN_SLOT": "node1+0:0"}
    assert is_elastic(elastic)
    assert is_restarted(elastic)
    for environ in (HOROVOD, {**OPEN_MPI, "HVDTRAIN_SLOT": "node1+0:0"}, TORCHRUN, {}):
        assert not is_elastic(environ)
    assert not is_restarted(HOROVOD)


def test_torchrun_restarts_ranks_if_max_restarts_is_positive() -> None:
    assert is_restarted({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"})
    for environ in (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"}, {}):
        assert not is_restarted(environ)
    assert not is_restarted({**OPEN_MPI, "TORCHELASTIC_MAX_RESTARTS": "3"})
